"""TSTModule, PhaseSwitch and the Trainer together."""

import csv
import json
import math
import os
import subprocess
import sys
import tempfile

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

import tst_lightning.module
from tests.conftest import VOCABULARY
from tst_lightning import (
    MetricsCSV,
    Phases,
    PhaseSchedule,
    Stage,
    StepCheckpoint,
    Transformer,
    TransformerConfig,
    TSTDataModule,
    TSTModule,
    UserError,
    fold,
    next_bag_targets,
)


def network(vocab_size=VOCABULARY, width=16):
    seed_everything(1, verbose=False)
    return Transformer(
        TransformerConfig(
            vocab_size=vocab_size,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )


def trainer(folder, steps, **options):
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": MetricsCSV(folder),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "log_every_n_steps": 1,
        "default_root_dir": folder,
        "num_sanity_val_steps": 0,
        "check_val_every_n_epoch": None,
        "use_distributed_sampler": False,
    }
    return Trainer(max_steps=steps, **{**defaults, **options})


def data(corpus, **options):
    return TSTDataModule(
        str(corpus.directory),
        **{"latent_length": 32, "global_batch_size": 4, "seed": 2, **options},
    )


def rows(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


class Batches(Callback):
    """Keeps a copy of every batch."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(batch.clone())


def fit(folder, corpus, phases, steps=8, *, module_options=None, data_options=None, ckpt_path=None, **options):
    module = TSTModule(network(), phases, **(module_options or {}))
    batches = Batches()
    run = trainer(folder, steps, callbacks=[batches, *options.pop("callbacks", [])], **options)
    run.fit(module, data(corpus, **(data_options or {})), ckpt_path=ckpt_path)
    return module, batches.seen


# ---------------------------------------------------------------------------- the loop


def test_training_equals_a_plain_loop(text_corpus, tmp_path):
    """Batches, schedule, clipping, optimiser and both losses against ten lines of PyTorch."""
    phases = Phases(bag_size=4, ratio=0.5)
    module, batches = fit(tmp_path, text_corpus, phases, module_options={"warmup_steps": 2}, gradient_clip_val=0.5)
    assert [tuple(b.shape) for b in batches] == [(4, 32, 4)] * 4 + [(4, 32)] * 4

    reference = network()
    norms = [p for n, p in reference.named_parameters() if "norm" in n]
    others = [p for n, p in reference.named_parameters() if "norm" not in n]
    optimizer = torch.optim.AdamW(
        [{"params": others}, {"params": norms, "weight_decay": 0.0}], betas=(0.9, 0.95), weight_decay=0.1
    )
    factors = [0.5, 1, 1, 1, 1, 1, 1, 1]  # two steps of warm-up, one of decay that starts at 1
    logged = [row for row in rows(tmp_path) if row["lr"]]
    for batch, factor, row in zip(batches, factors, logged, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * factor
        bags = batch.long() if batch.ndim == 3 else batch.long().unsqueeze(-1)
        loss = reference(bags, next_bag_targets(bags))
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optimizer.step()
        assert float(row["train/superposition_loss"] or row["train/loss"]) == loss.item()
        assert float(row["grad_norm"]) == norm.item()
        assert float(row["lr"]) == pytest.approx(1e-3 * factor, rel=1e-12)
    for (name, a), b in zip(module.network.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(
    "phases", [Phases(bag_size=1, ratio=0.5), Phases(bag_size=4, ratio=0.0), Phases(stages=[])], ids=str
)
def test_every_way_to_write_the_baseline_is_plain_training(phases, text_corpus, tmp_path):
    module, batches = fit(tmp_path / "a", text_corpus, phases, steps=3)
    plain, plain_batches = fit(tmp_path / "b", text_corpus, None, steps=3)
    assert all(torch.equal(a, b) for a, b in zip(batches, plain_batches, strict=True))
    assert (tmp_path / "a/metrics.csv").read_bytes() == (tmp_path / "b/metrics.csv").read_bytes()
    assert all(torch.equal(a, b) for a, b in zip(module.network.parameters(), plain.network.parameters(), strict=True))


def test_accumulation_reads_the_same_data_and_gives_the_same_run(text_corpus, tmp_path):
    phases = Phases(bag_size=4, ratio=0.5)
    runs = {}
    for accumulation in (1, 2, 4):
        _, batches = fit(tmp_path / str(accumulation), text_corpus, phases, accumulate_grad_batches=accumulation)
        per_step = [batches[i : i + accumulation] for i in range(0, len(batches), accumulation)]
        runs[accumulation] = [torch.cat(micro) for micro in per_step], rows(tmp_path / str(accumulation))
    for accumulation in (2, 4):
        for a, b in zip(runs[1][0], runs[accumulation][0], strict=True):
            assert torch.equal(a, b)
        for a, b in zip(runs[1][1], runs[accumulation][1], strict=True):
            assert {k: float(v) for k, v in a.items() if v} == pytest.approx(
                {k: float(v) for k, v in b.items() if v}, rel=2e-5
            )


def test_every_arm_starts_from_the_same_weights_and_units(text_corpus, tmp_path):
    """At equal data read, bags are exactly the plain windows of the baseline, side by side."""
    _, bagged = fit(tmp_path / "a", text_corpus, Phases(bag_size=2, ratio=1.0), steps=16)
    _, plain = fit(tmp_path / "b", text_corpus, None, steps=32)
    # a group is 16 columns: step j of the bags is rows 0 and 1 of column j
    for step in range(16):
        assert torch.equal(bagged[step].flatten(1), torch.cat([plain[step], plain[step + 16]], dim=1))


def test_the_optimiser_and_its_state_carry_across_the_switch(text_corpus, tmp_path):
    class Moments(Callback):
        def __init__(self):
            self.steps, self.same, self.optimizer = [], [], None

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            optimizer = trainer.optimizers[0]
            self.same.append(self.optimizer in (None, optimizer))
            self.optimizer = optimizer
            self.steps.append(float(optimizer.state[pl_module.network.lm_head.weight]["step"]))

    moments = Moments()
    fit(tmp_path, text_corpus, Phases(bag_size=4, ratio=0.5), callbacks=[moments])
    assert moments.steps == list(range(1, 9)) and all(moments.same)


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adafactor", "RMSprop", "NAdam"])
def test_any_optimiser(name, text_corpus, tmp_path):
    optimizer = getattr(torch.optim, name)
    module, _ = fit(
        tmp_path,
        text_corpus,
        Phases(bag_size=4, ratio=0.5),
        module_options={"optimizer": lambda groups: optimizer(groups, lr=1e-2, weight_decay=0.01)},
    )
    assert type(module.optimizers().optimizer) is optimizer
    assert [group["weight_decay"] for group in module.optimizers().param_groups] == [0.01, 0.0]


def test_value_clipping_and_no_clipping(text_corpus, tmp_path):
    def sgd(groups):
        return torch.optim.SGD(groups, lr=1.0)

    fit(tmp_path / "none", text_corpus, None, steps=2, module_options={"optimizer": sgd})
    fit(
        tmp_path / "value", text_corpus, None, steps=2, module_options={"optimizer": sgd},
        gradient_clip_val=1e-4, gradient_clip_algorithm="value",
    )  # fmt: skip
    none, value = rows(tmp_path / "none"), rows(tmp_path / "value")
    assert none[0]["grad_norm"] == value[0]["grad_norm"]  # logged before clipping
    assert none[1]["train/loss"] != value[1]["train/loss"]


# ---------------------------------------------------------------------------- validation


def test_held_out_loss_is_token_weighted_over_every_window(text_corpus, tmp_path):
    tokens = text_corpus.splits["val"].tokens
    size = next(size for size in range(3, 10) if (tokens // 32) % size)  # so that the last batch is a short one
    module, _ = fit(tmp_path, text_corpus, None, steps=2, data_options={"val_batch_size": size})
    source = data(text_corpus).stream("val").read(0, tokens // 32 * 32)
    windows = torch.from_numpy(source.copy()).view(-1, 32).long()
    with torch.no_grad():
        logits = module.network.double()(windows[..., None])
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), windows[:, 1:].flatten())
    assert float(rows(tmp_path)[-1]["val/loss"]) == pytest.approx(expected.item(), rel=1e-6)


def test_the_run_ends_with_a_validation_whatever_the_interval(text_corpus, tmp_path):
    fit(tmp_path, text_corpus, None, steps=7, val_check_interval=3)
    assert [row["step"] for row in rows(tmp_path) if row["val/loss"]] == ["3", "6", "7"]


def test_rows_are_logged_at_intervals_and_at_both_ends_of_a_phase(text_corpus, tmp_path):
    fit(
        tmp_path,
        text_corpus,
        Phases(bag_size=2, ratio=0.5),
        steps=14,
        log_every_n_steps=5,
        limit_val_batches=0,
    )
    assert [int(row["step"]) for row in rows(tmp_path)] == [1, 5, 7, 8, 10, 14]


# ---------------------------------------------------------------------------- leakage


def shifted_then_bagged(bags):
    """The fault that this test must find: labels shifted by one token, then bagged."""
    tokens = bags.flatten(-2)
    shifted = torch.cat([tokens[..., 1:], torch.full_like(tokens[..., :1], -100)], dim=-1)
    return fold(shifted, bags.shape[-1])


@pytest.mark.parametrize("planted", [False, True])
def test_nothing_can_be_learned_from_random_tokens(planted, tmp_path, monkeypatch):
    vocab_size, bag_size = 32, 4
    if planted:
        monkeypatch.setattr(tst_lightning.module, "next_bag_targets", shifted_then_bagged)
    generator = torch.Generator().manual_seed(0)

    def random_bags(count):
        return torch.randint(vocab_size, (count, 16, bag_size), generator=generator)

    module = TSTModule(
        network(vocab_size, width=32),
        Phases(bag_size=bag_size, ratio=1.0),
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.1),
    )
    loader = DataLoader(random_bags(150 * 16), batch_size=16)
    trainer(tmp_path, 150).fit(module, loader)
    with torch.no_grad():
        held_out = module.training_step(random_bags(256), 0).item()
    if planted:
        assert held_out < 0.97 * math.log(vocab_size), "the planted leak was not learned, so the test shows nothing"
    else:
        assert held_out == pytest.approx(math.log(vocab_size), rel=0.01)


# ---------------------------------------------------------------------------- faults


def test_a_batch_of_another_phase_stops_the_run(tmp_path):
    module = TSTModule(network(), Phases(bag_size=4, ratio=0.5))
    loader = DataLoader(torch.zeros(64, 8, 4, dtype=torch.long), batch_size=4)
    with pytest.raises(RuntimeError, match=r"step 4 belongs to the recovery phase .* shape \(4, 8, 4\)"):
        trainer(tmp_path, 8).fit(module, loader)


def test_all_faults_at_once_before_anything_starts(text_corpus, tmp_path):
    module = TSTModule(network(vocab_size=100), Phases(bag_size=5, ratio=0.5), warmup_steps=9, weighting="steep")
    with pytest.raises(UserError) as error:
        trainer(tmp_path, 8, accumulate_grad_batches=3).fit(module, data(text_corpus))
    faults = "\n".join(error.value.faults)
    for fragment in (
        "weighting='steep' is unknown",
        "warmup_steps=9",
        "global_batch_size=4 is not a multiple of 3",
        f"vocabulary of {VOCABULARY}, but the network has 100 rows",
    ):
        assert fragment in faults
    assert not (tmp_path / "metrics.csv").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"phases": Phases(bag_size=5, ratio=0.5)}, "bag size 5 does not divide data.unit_windows=48"),
        (
            {"phases": Phases(stages=[Stage(12, 0.2), Stage(8, 0.2)])},
            "bag size 8 does not divide 12, the bag size of the stage before it",
        ),
        ({"data_options": {"latent_length": 10**5}}, "less than one window"),
        ({"data_options": {"latent_length": 1}}, "data.latent_length=1 must be at least 2"),
        ({"steps": -1}, "set trainer.max_steps"),
    ],
)
def test_data_faults(options, message, text_corpus, tmp_path):
    options = {"phases": None, **options}
    with pytest.raises(UserError, match=message):
        fit(tmp_path, text_corpus, **options)


def test_a_run_that_reads_the_corpus_twice_is_told_so(text_corpus):
    phases = Phases(bag_size=16, ratio=1.0)
    lines = data(text_corpus).describe(phases.schedule(10**4), vocab_size=VOCABULARY + 64)
    assert any("64 are never trained on" in line for line in lines)
    assert any(line.startswith("WARNING") and "epochs" not in line and "times" in line for line in lines)
    assert not any(
        line.startswith(("WARNING", "NOTE"))
        for line in data(text_corpus).describe(PhaseSchedule.from_ratio(1, 0, 3), vocab_size=VOCABULARY)
    )


# ---------------------------------------------------------------------------- processes


def close(a, b, rel=1e-5):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert {k: float(v) for k, v in x.items() if v} == pytest.approx(
            {k: float(v) for k, v in y.items() if v}, rel=rel
        )


def in_two_processes(corpus, folder, ckpt_path=""):
    script = os.path.join(os.path.dirname(__file__), "two_processes.py")
    result = subprocess.run(
        [sys.executable, script, str(corpus.directory), str(folder), str(ckpt_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert "sync_dist" not in result.stderr


TWO_PROCESSES = {
    "phases": Phases(bag_size=4, ratio=0.5),
    "val_check_interval": 4,
    "data_options": {"val_batch_size": 3},
    "enable_checkpointing": True,
}


@pytest.mark.slow
def test_two_processes_equal_one_also_when_one_goes_on_for_the_other(text_corpus, tmp_path):
    """DDP over gloo: batches, losses, norms and held-out loss to fp32 rounding, through a change of topology."""
    all_of_them = StepCheckpoint(every_n_steps=1, keep=-1)
    fit(tmp_path / "one", text_corpus, callbacks=[all_of_them], **TWO_PROCESSES)
    in_two_processes(text_corpus, tmp_path / "two")
    assert len(rows(tmp_path / "one")) == 10
    close(rows(tmp_path / "two"), rows(tmp_path / "one"))

    # from step 3, in mid-phase: two processes become one with two micro-batches, and the other way round
    saved = "checkpoints/step-000000003.ckpt"
    folder = tmp_path / "two then one"
    fit(
        folder, text_corpus, **{**TWO_PROCESSES, "val_check_interval": 8}, ckpt_path=tmp_path / "two" / saved,
        accumulate_grad_batches=2, callbacks=[StepCheckpoint()],
    )  # fmt: skip
    close(rows(folder), rows(tmp_path / "one")[3:])
    in_two_processes(text_corpus, tmp_path / "one then two", tmp_path / "one" / saved)
    close(rows(tmp_path / "one then two"), rows(tmp_path / "one")[3:])


# ---------------------------------------------------------------------------- checkpoints


def test_checkpoints_hold_tensors_and_plain_types_and_say_what_they_are(text_corpus, tmp_path):
    phases = Phases(bag_size=4, ratio=0.5)
    checkpoint = StepCheckpoint(every_n_steps=3, keep=2)
    fit(tmp_path, text_corpus, phases, callbacks=[checkpoint], enable_checkpointing=True)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-000000006.ckpt", "step-000000008.ckpt"]
    saved = torch.load(tmp_path / "checkpoints" / names[0], weights_only=True)
    assert saved["tst_lightning"]["step"] == 6
    assert saved["tst_lightning"]["windows_read"] == 4 * (4 * 4 + 2)
    assert saved["tst_lightning"]["schedule"] == {"phases": [[4, 0, 4], [1, 4, 8]]}
    assert TransformerConfig.from_dict(saved["tst_lightning"]["network"]) == network().config


def test_the_newest_checkpoints_are_kept_by_number_and_all_if_asked(text_corpus, tmp_path):
    fit(
        tmp_path, text_corpus, None, steps=11, enable_checkpointing=True, limit_val_batches=0,
        callbacks=[StepCheckpoint(every_n_steps=1, keep=-1)],
    )  # fmt: skip
    assert len(list((tmp_path / "checkpoints").iterdir())) == 11


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (4, 2)])
def test_another_accumulation_goes_on_with_the_same_steps(before, after, text_corpus, tmp_path):
    phases = Phases(bag_size=4, ratio=0.5)
    fit(tmp_path / "whole", text_corpus, phases, limit_val_batches=0)
    fit(
        tmp_path / "before", text_corpus, phases, accumulate_grad_batches=before, limit_val_batches=0,
        enable_checkpointing=True, callbacks=[StepCheckpoint(every_n_steps=1, keep=-1)],
    )  # fmt: skip
    fit(
        tmp_path / "after", text_corpus, phases, accumulate_grad_batches=after, limit_val_batches=0,
        ckpt_path=tmp_path / "before/checkpoints/step-000000003.ckpt",
    )  # fmt: skip
    close(rows(tmp_path / "after"), rows(tmp_path / "whole")[3:], rel=2e-5)


class StopAt(Callback):
    """Asks for a stop, or breaks, in the middle of a step, as max_time or a fault may."""

    def __init__(self, micro_batches, error=False):
        self.micro_batches, self.error = micro_batches, error

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx + 1 == self.micro_batches:
            if self.error:
                raise ArithmeticError("planted")
            trainer.should_stop = True


@pytest.mark.parametrize("how", ["stop", "save after an error"])
def test_a_checkpoint_from_the_middle_of_a_step_goes_on_with_the_whole_step(how, text_corpus, tmp_path):
    phases = Phases(bag_size=4, ratio=0.5)
    options = {"accumulate_grad_batches": 2, "val_check_interval": 4}
    fit(tmp_path / "whole", text_corpus, phases, **options)
    module = TSTModule(network(), phases)
    if how == "stop":  # validates, and must not save, in mid-step
        saver = StepCheckpoint(every_n_steps=2)
        run = trainer(tmp_path, 8, callbacks=[StopAt(9), saver], enable_checkpointing=True, **options)
        run.fit(module, data(text_corpus))
        saved = tmp_path / "checkpoints/step-000000004.ckpt"
    else:
        run = trainer(tmp_path, 8, callbacks=[StopAt(9, error=True)], **options)
        with pytest.raises(ArithmeticError):
            run.fit(module, data(text_corpus))
        saved = tmp_path / "rescued.ckpt"
        run.save_checkpoint(saved)
    fit(tmp_path / "after", text_corpus, phases, ckpt_path=saved, **options)
    whole, after = (
        [{k: v for k, v in row.items() if v} for row in rows(tmp_path / name) if row["lr"]]
        for name in ("whole", "after")
    )
    assert after == whole[4:]


def test_logs_go_on_in_place_with_lightnings_own_checkpoint_callback_too(text_corpus, tmp_path):
    phases = Phases(bag_size=4, ratio=0.5)
    fit(tmp_path / "whole", text_corpus, phases)

    def saver():
        return ModelCheckpoint(dirpath=tmp_path / "run/checkpoints", every_n_train_steps=3, save_top_k=-1)

    fit(tmp_path / "run", text_corpus, phases, callbacks=[saver(), StopAt(5)], enable_checkpointing=True)
    saved = tmp_path / "run/checkpoints/epoch=0-step=3.ckpt"
    fit(tmp_path / "run", text_corpus, phases, callbacks=[saver()], enable_checkpointing=True, ckpt_path=saved)
    assert (tmp_path / "run/metrics.csv").read_bytes() == (tmp_path / "whole/metrics.csv").read_bytes()
    with pytest.raises(UserError, match="already holds the log of a run"):
        fit(tmp_path / "run", text_corpus, phases)
    assert (tmp_path / "run/metrics.csv").read_bytes() == (tmp_path / "whole/metrics.csv").read_bytes()


def test_the_held_out_mean_survives_bf16_and_shows_nan(text_corpus, tmp_path):
    module = TSTModule(network())
    exact = trainer(tmp_path, 1).validate(module, data(text_corpus, val_batch_size=1), verbose=False)[0]["val/loss"]
    low = trainer(tmp_path, 1, precision="bf16-true")
    found = low.validate(TSTModule(network()), data(text_corpus, val_batch_size=1), verbose=False)[0]["val/loss"]
    assert found == pytest.approx(exact, rel=2e-3)
    with torch.no_grad():
        module.network.lm_head.weight[5] = math.nan
    broken = trainer(tmp_path, 1, logger=False).validate(module, data(text_corpus), verbose=False)[0]
    assert math.isnan(broken["val/loss"])


def test_weights_load_without_a_trainer(text_corpus, tmp_path):
    module, _ = fit(
        tmp_path, text_corpus, None, steps=2, callbacks=[StepCheckpoint(every_n_steps=1)], enable_checkpointing=True
    )
    path = tmp_path / "checkpoints/step-000000002.ckpt"
    loaded = TSTModule.load_from_checkpoint(path, network=network(), weights_only=True, map_location="cpu")
    for a, b in zip(module.network.parameters(), loaded.network.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_clip_val": -1.0}, "gradient_clip_val=-1.0 must be a positive number"),
        ({"limit_train_batches": 1}, "limit_train_batches"),
        ({"overfit_batches": 2}, "overfit_batches"),
        ({"val_check_interval": 0}, "val_check_interval=0 must be at least 1"),
        ({"val_check_interval": 3, "accumulate_grad_batches": 2}, "use a multiple of accumulate_grad_batches=2"),
        ({"log_every_n_steps": -1}, "log_every_n_steps=-1"),
        ({"module_options": {"optimizer": torch.optim.LBFGS}}, "model.optimizer: LBFGS"),
        ({"module_options": {"optimizer": torch.optim.Muon}}, "model.optimizer: Muon"),
        ({"val_check_interval": "00:00:01:00"}, "val_check_interval is a time"),
        (
            {"module_options": {"optimizer": lambda groups: torch.optim.Adam(groups, lr=-1.0)}},
            "model.optimizer: .*-1.0",
        ),
    ],
)
def test_trainer_faults(options, message, text_corpus, tmp_path):
    with pytest.raises(UserError, match=message):
        fit(tmp_path, text_corpus, None, **options)


def test_checkpoint_counts():
    with pytest.raises(UserError) as error:
        StepCheckpoint(every_n_steps=0, keep=0)
    assert len(error.value.faults) == 2


def test_a_batch_that_is_no_tensor_is_named(tmp_path):
    loader = DataLoader(TensorDataset(torch.zeros(64, 8, dtype=torch.long)), batch_size=4)
    with pytest.raises(RuntimeError, match="its batch has type list: expected a tensor of tokens"):
        trainer(tmp_path, 8).fit(TSTModule(network()), loader)


def test_held_out_batches_are_no_larger_than_the_held_out_text(text_corpus, tmp_path):
    module = data(text_corpus, val_batch_size=10**6)
    module.trainer = trainer(tmp_path, 1)
    windows = text_corpus.splits["val"].tokens // 32
    assert [tuple(tokens.shape) for tokens, _ in module.val_dataloader()] == [(windows, 32)]


def test_whole_files_are_written_straight_to_their_place(text_corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "no such folder"))
    fit(tmp_path, text_corpus, None, steps=1, callbacks=[StepCheckpoint()], enable_checkpointing=True)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000000001.ckpt"]


def test_a_save_that_fails_leaves_nothing(text_corpus, tmp_path, monkeypatch):
    def full(checkpoint, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space"):
        fit(tmp_path, text_corpus, None, steps=1, callbacks=[StepCheckpoint()], enable_checkpointing=True)
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_resume_that_is_refused_drops_nothing(text_corpus, tmp_path):
    saver = StepCheckpoint(every_n_steps=1, keep=-1)
    fit(tmp_path, text_corpus, None, steps=4, callbacks=[saver], enable_checkpointing=True)
    before = (tmp_path / "metrics.csv").read_bytes()
    with pytest.raises(UserError, match=r"holds step-000000003\.ckpt, step-000000004\.ckpt beside"):
        fit(
            tmp_path, text_corpus, None, steps=4, callbacks=[StepCheckpoint()], enable_checkpointing=True,
            ckpt_path=tmp_path / "checkpoints/step-000000002.ckpt",
        )  # fmt: skip
    assert (tmp_path / "metrics.csv").read_bytes() == before


# ---------------------------------------------------------------------------- the run's own record


def test_a_run_describes_itself(text_corpus, tmp_path, monkeypatch):
    """``run.json`` holds all that a later reader needs to tell whether two runs may be compared."""
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    module = TSTModule(network(), Phases(bag_size=4, ratio=0.5), warmup_steps=2)
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    trainer(tmp_path, 8, gradient_clip_val=0.5).fit(module, data(text_corpus))
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["schedule"] == {"phases": [[4, 0, 4], [1, 4, 8]]}
    assert record["network"] == module.network.config.to_dict()
    assert record["optimisation"]["optimizer.lr"] == 1e-3 and record["optimisation"]["gradient_clip_val"] == 0.5
    assert record["data"]["seed"] == 2 and record["data"]["latent_length"] == 32
    assert record["data"]["held_out_sha256"] == [text_corpus.splits["val"].sha256]
    assert record["data"]["tokenizer_sha256"] == text_corpus.tokenizer_sha256
    assert record["seed"] == 7 and record["parameters"] == sum(p.numel() for p in module.parameters())
    assert record["flops_per_latent_token"] == module.network.config.flops_per_token(32)
    assert record["machine"] == {"device": "cpu", "precision": "32-true", "processes": 1, "torch": torch.__version__}
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.csv", "run.json"}
    for row in rows(tmp_path):
        if row["tokens/latent"]:
            assert int(row["compute/flops"]) == int(row["tokens/latent"]) * record["flops_per_latent_token"]


def test_a_resume_does_not_rewrite_how_the_run_began(text_corpus, tmp_path):
    phases, options = Phases(bag_size=4, ratio=0.5), {"enable_checkpointing": True}
    saver = StepCheckpoint(every_n_steps=4)
    fit(tmp_path, text_corpus, phases, callbacks=[saver, StopAt(6)], **options)
    began = json.loads((tmp_path / "run.json").read_text())
    assert "resumes" not in began

    saved = tmp_path / "checkpoints/step-000000004.ckpt"
    for path in (tmp_path / "checkpoints").iterdir():
        if path != saved:
            path.unlink()
    fit(tmp_path, text_corpus, phases, callbacks=[StepCheckpoint(), StopAt(6)], ckpt_path=saved, **options)
    assert json.loads((tmp_path / "run.json").read_text()) == began, "the same machine: nothing to tell"

    checkpoint = torch.load(saved, weights_only=True)
    checkpoint["run"]["machine"]["device"], checkpoint["run"]["seed"] = "another", 7
    torch.save(checkpoint, saved)
    for path in (tmp_path / "checkpoints").iterdir():
        if path != saved:
            path.unlink()
    fit(tmp_path, text_corpus, phases, callbacks=[StepCheckpoint()], ckpt_path=saved, **options)
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["seed"] == 7 and record["machine"]["device"] == "another"
    assert record["resumes"] == [{"step": 4, "version": began["version"], "machine": began["machine"]}]


def test_a_network_that_cannot_count_its_flops_has_none_in_the_log(text_corpus, tmp_path):
    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, bags, targets=None, weighting="uniform"):
            return self.inner(bags, targets, weighting)

    trainer(tmp_path, 2).fit(TSTModule(Plain()), data(text_corpus))
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["flops_per_latent_token"] is None and record["network"] == {} and record["parameters"] > 0
    assert "compute/flops" not in rows(tmp_path)[0]
