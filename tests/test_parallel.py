"""However the weights are shared out, a run is the run of one process."""

import re

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn

from tests.runs import logged, run, run_ranks
from tst_lightning import FSDP2Strategy, Transformer, TransformerConfig, UserError
from tst_lightning.parallel import parallelise
from tst_lightning.strategies import strategy_faults

CPU_FSDP = "tests.test_parallel.OnCPU"
HYBRID = '{"class_path": "tst_lightning.FSDP2Strategy", "init_args": {"shard_size": 2}}'
LAYERS = "--model.network.init_args.config.num_hidden_layers=2"


class OnCPU(FSDPStrategy):
    """Lightning 2.6.6 refuses exactly its own class there, for FSDP1 computes on a CPU well enough for a test."""

    def __init__(self, **kwargs):
        super().__init__(state_dict_type="sharded", **kwargs)  # "full" mixes up Adam's state on a CPU


SHAPE = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}
CPU = torch.device("cpu")


def on_meta(**shape):
    with torch.device("meta"):
        return Transformer(TransformerConfig(**{**SHAPE, **shape}))


@pytest.mark.parametrize("tied", [False, True])
def test_a_network_from_the_meta_device_is_the_one_made_here(tied, monkeypatch):
    torch.manual_seed(7)
    real = Transformer(TransformerConfig(**SHAPE, tie_word_embeddings=tied))
    make = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: make(*args, **kwargs).fill_(torch.nan))  # poison
    torch.manual_seed(1)
    before = torch.get_rng_state()
    made = parallelise(on_meta(tie_word_embeddings=tied), CPU, seed=7)
    assert torch.equal(torch.get_rng_state(), before)
    assert made.state_dict().keys() == real.state_dict().keys()
    for name, value in real.state_dict().items():
        assert torch.equal(made.state_dict()[name], value), name
    assert (made.lm_head.weight is made.model.embed_tokens.weight) == tied
    assert not list(made.buffers())  # the rotary embedding is computed


def test_buffers_on_the_meta_device_are_initialised_or_refused():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(3), persistent=False)

    class Own(Scale):
        def reset_parameters(self):
            self.scale.fill_(1.0)

    with torch.device("meta"):
        good, bad = Own(), nn.Sequential(Scale())
    made = parallelise(good, CPU)
    assert made.scale.tolist() == [1.0] * 3
    assert not made.state_dict()
    with pytest.raises(UserError, match="Scale has scale on the meta device and no reset_parameters"):
        parallelise(bad, CPU)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_blocks_compile_once_for_both_phases_and_give_the_same_gradients(checkpointing):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain = parallelise(on_meta(), CPU, seed=1)
    network = parallelise(on_meta(), CPU, seed=1, activation_checkpointing=checkpointing, compile_blocks=True)
    graphs = []
    for bag_size in (4, 4, 1, 1):
        bags = torch.randint(50, (2, 8, bag_size), generator=torch.Generator().manual_seed(bag_size))
        for model in (plain, network):
            model.zero_grad()
            model(bags, bags).backward()
        for (name, p), q in zip(plain.named_parameters(), network.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-5, atol=1e-7, msg=name)
        with torch.no_grad():
            assert network(bags[:1, :5]).shape == (1, 5, 50)  # another shape
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs == [graphs[0]] * 4
    assert graphs[0] == 1  # for all three blocks
    assert not torch._dynamo.utils.counters["graph_break"]


def test_checkpointing_keeps_only_the_inputs_of_blocks():
    def kept(**options):
        network, sizes = parallelise(on_meta(num_hidden_layers=4), CPU, **options), []
        bags = torch.zeros(2, 64, 1, dtype=torch.long)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):
            network.model(bags)
        return sum(sizes)

    assert kept(activation_checkpointing=True) < kept() / 5


def test_a_network_without_blocks_is_refused():
    with pytest.raises(UserError, match="Linear does not say which of its modules repeat"):
        parallelise(nn.Linear(2, 2), CPU, compile_blocks=True)


class Pretended:
    """A trainer of four processes."""

    world_size = 4

    def __init__(self, strategy, world_size=4):
        self.strategy, self.world_size = strategy, world_size


@pytest.mark.parametrize(
    ("strategy", "messages"),
    [
        (FSDP2Strategy(shard_size=3), ["shard_size=3 does not divide the 4 processes"]),
        (FSDP2Strategy(shard_size=0), ["shard_size=0 does not divide"]),
        (FSDP2Strategy(shard_size=2), []),
        (ModelParallelStrategy(), ["data_parallel_size=auto and tensor_parallel_size=auto.*set 4 and 1"]),
        (ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=1), []),
        (
            FSDPStrategy(auto_wrap_policy={nn.Linear}, activation_checkpointing_policy={nn.Linear}),
            ["auto_wrap_policy: leave it out", "set model.activation_checkpointing"],
        ),
    ],
)
def test_strategy_faults(strategy, messages):
    faults = strategy_faults(Pretended(strategy))
    assert len(faults) == len(messages)
    for fault, message in zip(faults, messages, strict=True):
        assert re.search(message, fault)


def test_fsdp1_on_one_process_is_refused():
    (fault,) = strategy_faults(Pretended(FSDPStrategy(), world_size=1))
    assert "take trainer.strategy=auto, or fsdp2" in fault
    assert not strategy_faults(Trainer(accelerator="cpu", devices=1, logger=False))


def close(rows, others, rel=1e-5):
    assert len(rows) == len(others) > 0
    for row, other in zip(rows, others, strict=True):
        here, there = ({name: float(value) for name, value in r.items() if value} for r in (row, other))
        assert here == pytest.approx(there, rel=rel)


@pytest.fixture(scope="module")
def alone(recipe, tmp_path_factory):
    """One process, whole."""
    folder = tmp_path_factory.mktemp("alone")
    status, output = run("fit", f"--config={recipe}", LAYERS, folder=folder)
    assert status == 0, output
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", CPU_FSDP])
def test_two_processes_train_as_one(strategy, recipe, alone, tmp_path):
    statuses, outputs = run_ranks("fit", f"--config={recipe}", LAYERS, folder=tmp_path, strategy=strategy)
    assert statuses == [0, 0], outputs
    assert "network        Transformer, 15.4k parameters (15,440)" in outputs[0]
    close(logged(tmp_path / "run"), logged(alone / "run"))


@pytest.mark.slow
def test_hybrid_sharding_checkpointing_and_compilation_change_nothing(recipe, alone, tmp_path):
    statuses, outputs = run_ranks(
        "fit", f"--config={recipe}", LAYERS, "--trainer.accumulate_grad_batches=1", "--trainer.val_check_interval=4",
 "--model.activation_checkpointing=true", "--model.compile_blocks=true",
        folder=tmp_path, strategy=HYBRID, ranks=4,
    )  # fmt: skip
    assert statuses == [0] * 4, outputs
    close(logged(tmp_path / "run"), logged(alone / "run"))


def kill_all(step, ranks):
    kills = [
        f'{{"class_path": "tests.runs.KillAt", "init_args": {{"step": {step}, "rank": {r}}}}}' for r in range(ranks)
    ]
    return f"--trainer.callbacks=[{', '.join(kills)}]"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ranks"), [("fsdp2", [2, 1, 2]), (CPU_FSDP, [2, 4]), ("ddp", [2, 1])], ids=["fsdp2", "fsdp1", "ddp"]
)
def test_a_killed_run_goes_on_with_other_ranks(strategy, ranks, recipe, alone, tmp_path):
    """Saved at steps 5, 10, 12, 15, 20; killed at 7 and, where there are three parts, at 17."""
    kills = [7, 17][: len(ranks) - 1]
    for count, step in zip(ranks, [*kills, None], strict=True):
        accumulation = 1 if count == 4 else 2
        arguments = [
            "fit", f"--config={recipe}", LAYERS, "--ckpt_path=last",
            f"--checkpoint.asynchronous={'true' if strategy == CPU_FSDP else 'false'}",
            f"--trainer.accumulate_grad_batches={accumulation}", f"--trainer.val_check_interval={4 * accumulation}",
        ]  # fmt: skip
        if step is not None:
            arguments.append(kill_all(step, count))
        statuses, outputs = run_ranks(*arguments, folder=tmp_path, ranks=count, strategy=strategy)
        assert statuses == [-9 if step else 0] * count, outputs
    close(logged(tmp_path / "run"), logged(alone / "run"))
