"""A loss or gradient that is no number stops the run before it does harm."""

import math

import pytest
import torch
from lightning.pytorch import Callback

from tests.runs import logged, run, run_ranks
from tests.test_training import data, network, rows, trainer
from tst_lightning import NonFiniteError, Phases, StepCheckpoint, TSTModule
from tst_lightning.checkpoints import list_checkpoints


class Planted(TSTModule):
    """The loss, the gradients or the weights turn bad in one micro-batch of a step."""

    def __init__(self, *args, step, micro_batch=0, where="loss", value=math.nan, **options):
        super().__init__(*args, **options)
        self.bad = step, micro_batch, where, value

    def training_step(self, batch, batch_idx):
        step, micro_batch, where, value = self.bad
        here = (self.trainer.global_step, batch_idx % self.trainer.accumulate_grad_batches) == (step, micro_batch)
        if here and where == "weights":
            with torch.no_grad():
                self.network.lm_head.weight[3, 3] = value
        loss = super().training_step(batch, batch_idx)
        if here and where == "loss":
            loss = loss * value
            self._losses[-1] = loss.detach()
        if here and where == "gradient":
            loss.register_hook(lambda gradient: gradient * value)
        return loss


class Before(Callback):
    """Weights and optimiser state as the last whole step left them."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.weights = {name: tensor.clone() for name, tensor in pl_module.state_dict().items()}
        self.optimizer = repr(trainer.optimizers[0].state_dict())


def fit(folder, corpus, **planted):
    module = Planted(network(), Phases(bag_size=4, ratio=0.5), **planted)
    before = Before()
    run = trainer(
        folder, 8, callbacks=[StepCheckpoint(every_n_steps=2), before], enable_checkpointing=True,
        accumulate_grad_batches=2,
    )  # fmt: skip
    with pytest.raises(NonFiniteError) as error:
        run.fit(module, data(corpus))
    return module, run, before, str(error.value)


@pytest.mark.parametrize(
    ("planted", "words"),
    [
        ({"step": 5, "micro_batch": 1}, "step 5: the loss of rank 0, micro-batch 1 was not finite"),
        ({"step": 5, "value": math.inf}, "step 5: the loss of rank 0, micro-batch 0 was not finite"),
        ({"step": 5, "where": "gradient", "micro_batch": 1}, "step 5: the gradients' norm (nan), though no loss, was"),
        ({"step": 5, "where": "gradient", "value": 1e38}, "step 5: the gradients' norm (inf), though no loss, was"),
        ({"step": 5, "where": "weights"}, "the loss of rank 0, micro-batch 0; rank 0, micro-batch 1 was"),
    ],
    ids=str,
)
def test_it_stops_before_the_optimiser_steps(planted, words, text_corpus, tmp_path):
    module, run, before, message = fit(tmp_path, text_corpus, **planted)
    assert words in message, message
    for part in (
        str(text_corpus.directory),
        "step-000000004.ckpt",
        "--ckpt_path last with --data.skip_steps '[5]'",
        "rate",
    ):
        assert part in message, (part, message)
    assert run.global_step == 5
    assert repr(run.optimizers[0].state_dict()) == before.optimizer
    after = module.state_dict()
    if planted.get("where") != "weights":
        assert all(torch.equal(after[name], tensor) for name, tensor in before.weights.items())
    assert [row["step"] for row in rows(tmp_path) if row["lr"]] == ["1", "2", "3", "4", "5"]
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == [
        "step-000000002.ckpt",
        "step-000000004.ckpt",
    ]
    for path in list_checkpoints(tmp_path / "checkpoints"):
        assert all(t.isfinite().all() for t in torch.load(path, weights_only=True)["state_dict"].values())


def test_the_first_step_names_no_checkpoint(text_corpus, tmp_path):
    message = fit(tmp_path, text_corpus, step=0)[-1]
    assert "there is no checkpoint yet" in message and "the same command with --data.skip_steps '[0]'" in message


def test_a_gradient_scaler_deals_with_infinite_gradients_itself(text_corpus, tmp_path, monkeypatch):
    """The scaler leaves such a step out; a loss that is no number is a fault with it too."""
    module = Planted(network(), step=1, where="gradient", value=math.inf)
    run = trainer(tmp_path, 2)
    monkeypatch.setattr(run.precision_plugin, "scaler", object(), raising=False)
    monkeypatch.setattr(module, "_unscales_itself", lambda optimizer: False)
    run.fit(module, data(text_corpus))
    assert run.global_step == 2
    module = Planted(network(), step=1)
    run = trainer(tmp_path / "b", 2)
    monkeypatch.setattr(run.precision_plugin, "scaler", object(), raising=False)
    monkeypatch.setattr(module, "_unscales_itself", lambda optimizer: False)
    with pytest.raises(NonFiniteError, match="step 1: the loss of rank 0"):
        run.fit(module, data(text_corpus))


class SpoilLoss(Callback):
    """Makes the loss of one rank's micro-batch nan."""

    def __init__(self, step: int, micro_batch: int, rank: int) -> None:
        self.where = step, micro_batch, rank

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if (trainer.global_step, batch_idx % trainer.accumulate_grad_batches, trainer.global_rank) == self.where:
            embedding = pl_module.network.model.embed_tokens
            pl_module.handle = embedding.register_forward_hook(lambda module, inputs, output: output * math.nan)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if hasattr(pl_module, "handle"):
            pl_module.handle.remove()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_one_clear_message_whichever_rank_sees_it(ranks, recipe, tmp_path):
    where = {"step": 7, "micro_batch": 1, "rank": ranks - 1}
    arguments = [
        "fit", "--config", recipe, "--trainer.callbacks+=tests.test_non_finite.SpoilLoss",
        *(f"--trainer.callbacks.{name}={value}" for name, value in where.items()),
    ]  # fmt: skip
    if ranks == 1:
        status, output = run(*arguments, folder=tmp_path)
        statuses, outputs = [status], [output]
    else:
        statuses, outputs = run_ranks(*arguments, folder=tmp_path)
    assert statuses == [1] * ranks, outputs
    assert f"error: step 7: the loss of rank {ranks - 1}, micro-batch 1 was not finite" in outputs[0], outputs[0]
    assert "the last good checkpoint: run/checkpoints/step-000000005.ckpt" in outputs[0]
    assert not any("Traceback" in output for output in outputs) and "not finite" not in "".join(outputs[1:])
    assert [path.name for path in list_checkpoints(tmp_path / "run/checkpoints")] == ["step-000000005.ckpt"]
    assert max(int(row["step"]) for row in logged(tmp_path / "run")) == 7
    run_again = run if ranks == 1 else run_ranks
    again = run_again("fit", "--config", recipe, "--ckpt_path=last", folder=tmp_path)[0]
    assert again in (0, [0, 0])
