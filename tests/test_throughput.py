"""The speed of a run, by a clock that only the test moves."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback

from tests.test_training import data, network, rows, trainer
from tst_lightning import Phases, StepCheckpoint, Throughput, TSTDataModule, TSTModule, UserError
from tst_lightning.callbacks import throughput

FETCH, STEP, VALIDATION, SAVE, SETUP = 1.0, 4.0, 100.0, 1000.0, 50.0  # seconds; a validation has two batches or more
LATENT = 4 * 32  # a step's positions


class Clock(Callback):
    """Time passes in here and nowhere else."""

    def __init__(self, monkeypatch):
        self.now = 12345.0
        monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def on_fit_start(self, trainer, pl_module):
        self.now += SETUP

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.now += VALIDATION

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self.now += SAVE


class SlowData(TSTDataModule):
    clock: Clock

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.clock.now += FETCH
        return batch


class SlowModule(TSTModule):
    clock: Clock

    def training_step(self, batch, batch_idx):
        self.clock.now += STEP
        return super().training_step(batch, batch_idx)


def fit(
    folder, corpus, clock, meter=None, net=None, phases=None, steps=8, ckpt_path=None, callbacks=(), **options
):  # fmt: skip
    """Train with the meter before the clock, so that it pauses before a checkpoint takes its time."""
    module = SlowModule(net or network(), phases)
    source = SlowData(str(corpus.directory), latent_length=32, global_batch_size=4)
    module.clock = source.clock = clock
    callbacks = [meter or Throughput(), clock, *callbacks]
    defaults = {"limit_val_batches": 0, "enable_checkpointing": any(isinstance(c, StepCheckpoint) for c in callbacks)}
    run = trainer(folder, steps, callbacks=callbacks, **{**defaults, **options})
    run.fit(module, source, ckpt_path=ckpt_path)
    return [{name: float(value) for name, value in row.items() if value} for row in rows(folder) if row["lr"]]


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_rates_between_rows(text_corpus, tmp_path, clock, capsys):
    logged = fit(tmp_path, text_corpus, clock, log_every_n_steps=3, steps=7)
    assert [row["step"] for row in logged] == [1, 3, 6, 7]
    # the first batch is there before training time begins, the others are waited for
    seconds = [STEP, 2 * (FETCH + STEP), 3 * (FETCH + STEP), FETCH + STEP]
    steps = [1, 2, 3, 1]
    flops = network().config.flops_per_token(32)
    for row, took, done in zip(logged, seconds, steps, strict=True):
        assert row["throughput/step_time"] == took / done
        assert row["throughput/latent_tokens_per_second"] == done * LATENT / took
        assert row["throughput/data_tokens_per_second"] == done * LATENT / took
        assert row["throughput/flops_per_second"] == pytest.approx(flops * done * LATENT / took, rel=1e-12)
        assert row["compute/flops"] == flops * row["step"] * LATENT
        assert row["time/wall_clock"] == SETUP + row["step"] * (FETCH + STEP)
    assert "throughput/mfu" not in logged[-1]  # nobody knows a CPU's peak
    rate = LATENT / (FETCH + STEP)
    assert f"throughput     {rate:.3g} latent and {rate:.3g} data tokens/s, 5e+03 ms a step" in capsys.readouterr().out


def test_accumulation_counts_optimiser_steps(text_corpus, tmp_path, clock):
    logged = fit(tmp_path, text_corpus, clock, steps=4, accumulate_grad_batches=2, log_every_n_steps=2)
    assert [row["step"] for row in logged] == [1, 2, 4]
    assert [row["throughput/step_time"] for row in logged] == [2 * STEP + FETCH, *[2 * (STEP + FETCH)] * 2]
    assert logged[-1]["throughput/latent_tokens_per_second"] == LATENT / (2 * (STEP + FETCH))


def test_the_data_rate_falls_at_the_switch_and_the_latent_rate_does_not(text_corpus, tmp_path, clock):
    logged = fit(tmp_path, text_corpus, clock, phases=Phases(bag_size=4, ratio=0.5), log_every_n_steps=3)
    assert [row["step"] for row in logged] == [1, 3, 4, 5, 6, 8]
    for row in logged[1:]:
        assert row["throughput/latent_tokens_per_second"] == LATENT / (FETCH + STEP)
        s = 4 if row["step"] <= 4 else 1
        assert row["throughput/data_tokens_per_second"] == s * LATENT / (FETCH + STEP)


def test_validations_and_checkpoints_are_wall_clock_but_no_training_time(text_corpus, tmp_path, clock):
    logged = fit(
        tmp_path,
        text_corpus,
        clock,
        steps=12,
        log_every_n_steps=4,
        limit_val_batches=2,
        val_check_interval=3,  # after steps 3, 6, 9, 12: between rows and with them
        callbacks=[StepCheckpoint(every_n_steps=5)],
    )
    assert [row["step"] for row in logged] == [1, 4, 8, 12]
    # after a pause, the next batch is there before training time goes on
    seconds = [STEP, 2 * FETCH + 3 * STEP, 2 * FETCH + 4 * STEP, 2 * FETCH + 4 * STEP]
    steps = [1, 3, 4, 4]
    assert [row["throughput/step_time"] for row in logged] == [
        took / done for took, done in zip(seconds, steps, strict=True)
    ]
    for row in logged:
        validations, saves = (row["step"] - 1) // 3, (row["step"] - 1) // 5
        passed = SETUP + row["step"] * (FETCH + STEP) + validations * 2 * (FETCH + VALIDATION) + saves * SAVE
        assert row["time/wall_clock"] == passed


def test_a_checkpoint_that_somebody_saves_before_the_row(text_corpus, tmp_path, clock):
    class Saver(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.save_checkpoint(tmp_path / "some.ckpt")

    logged = fit(tmp_path, text_corpus, clock, steps=3, callbacks=[Saver()])
    assert [row["throughput/step_time"] for row in logged] == [STEP] * 3
    assert logged[-1]["time/wall_clock"] == SETUP + 3 * (FETCH + STEP + SAVE)


def test_a_resumed_run_counts_on_from_its_checkpoint(text_corpus, tmp_path, clock):
    checkpoints = [StepCheckpoint(every_n_steps=4, keep=-1)]
    whole = fit(tmp_path, text_corpus, clock, callbacks=checkpoints, log_every_n_steps=2)
    (tmp_path / "checkpoints/step-000000008.ckpt").unlink()
    clock.now += 10_000.0  # nobody trains
    resumed = fit(
        tmp_path,
        text_corpus,
        clock,
        callbacks=[StepCheckpoint(every_n_steps=4)],
        log_every_n_steps=2,
        ckpt_path=tmp_path / "checkpoints/step-000000004.ckpt",
    )
    assert [row["step"] for row in resumed] == [1, 2, 4, 6, 8]
    assert resumed[:3] == whole[:3]
    saved = SETUP + 4 * (FETCH + STEP)  # on the clock as step 4 was saved
    assert [row["time/wall_clock"] for row in resumed[3:]] == [saved + SETUP + done * (FETCH + STEP) for done in (2, 4)]
    assert resumed[3]["throughput/step_time"] == (2 * STEP + FETCH) / 2
    assert resumed[3]["throughput/latent_tokens_per_second"] == 2 * LATENT / (2 * STEP + FETCH)


def test_the_same_callback_begins_anew_in_a_second_run(text_corpus, tmp_path, clock):
    meter = Throughput()
    first, second = (fit(tmp_path / name, text_corpus, clock, meter=meter, steps=3) for name in "ab")
    assert first == second


def test_mfu_is_a_share_of_all_devices_peak(text_corpus, tmp_path, clock, monkeypatch, capsys):
    logged = fit(tmp_path / "given", text_corpus, clock, meter=Throughput(peak_flops=1e9), steps=2)
    assert logged[1]["throughput/mfu"] == pytest.approx(logged[1]["throughput/flops_per_second"] / 1e9, rel=1e-12)
    share = logged[1]["throughput/mfu"]
    assert f"({share:.1%} of the peak)" in capsys.readouterr().out

    meter = Throughput()
    pretended = SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device("cuda", 1)), precision="bf16-mixed", world_size=4
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA B200" if device.index == 1 else "?")
    meter.setup(pretended, None, "fit")
    assert meter._peak == 4 * 2.25e15
    pretended.precision = "32-true"
    meter.setup(pretended, None, "fit")
    assert meter._peak == 4 * 75e12
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        meter.setup(pretended, None, "fit")
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert meter._peak == 4 * 1125e12


def test_a_network_of_unknown_flops_has_rates_all_the_same(text_corpus, tmp_path, clock):
    class Opaque(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, *args, **kwargs):
            return self.inner(*args, **kwargs)

    names = set(fit(tmp_path, text_corpus, clock, meter=Throughput(peak_flops=1e9), net=Opaque(), steps=2)[-1])
    assert {"throughput/step_time", "throughput/data_tokens_per_second", "time/wall_clock"} <= names
    assert not {"throughput/flops_per_second", "throughput/mfu", "compute/flops"} & names


@pytest.mark.parametrize("peak", [0, -1.0, float("nan"), float("inf")])
def test_a_peak_that_makes_no_sense(peak, text_corpus, tmp_path):
    run = trainer(tmp_path, 2, callbacks=[Throughput(peak_flops=peak)])
    with pytest.raises(UserError, match=f"peak_flops={peak} must be a device's dense FLOP/s"):
        run.fit(TSTModule(network()), data(text_corpus))


class Waits:
    """Counts what would wait for a device: reading a tensor's value, and synchronising."""

    def __init__(self, monkeypatch):
        self.where = []
        for name in ("item", "__float__", "__int__", "__bool__", "tolist", "cpu", "numpy"):
            monkeypatch.setattr(torch.Tensor, name, self._counting(name, getattr(torch.Tensor, name)))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: self.where.append("synchronize"))

    def _counting(self, name, original):
        def wait(tensor, *args, **kwargs):
            self.where.append(name)
            return original(tensor, *args, **kwargs)

        return wait


def test_it_never_waits_for_the_device_itself(text_corpus, tmp_path, monkeypatch):
    """Step by step, everything that a run with it waits for is what a run without it waits for."""
    waits = Waits(monkeypatch)

    class Watch(Callback):
        def __init__(self):
            self.per_step = []

        def on_train_start(self, trainer, pl_module):
            waits.where.clear()

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.per_step.append(waits.where.copy())
            waits.where.clear()

        def on_train_end(self, trainer, pl_module):
            self.per_step.append(waits.where.copy())

    seen = []
    for name, meters in (("with", [Throughput(peak_flops=1e12)]), ("without", [])):
        watch = Watch()
        run = trainer(tmp_path / name, 10, callbacks=[watch, *meters], log_every_n_steps=5, limit_val_batches=0)
        run.fit(TSTModule(network()), data(text_corpus))
        seen.append(watch.per_step)
    assert seen[0] == seen[1]
    # between rows one value is read, whether the step is finite; at steps 1, 5 and 10 the loss and the norm too
    assert [waited.count("__float__") for waited in seen[0][1:]] == [
        3 if step in (1, 5, 10) else 1 for step in range(1, 11)
    ]


def test_it_synchronises_where_a_pause_begins_and_only_there(monkeypatch):
    waits = Waits(monkeypatch)
    meter = Throughput()
    module = SimpleNamespace(device=torch.device("cuda", 0))
    meter.on_validation_start(None, module)  # not training yet: a sanity check
    assert waits.where == []
    meter._opened = 0.0
    meter.on_validation_start(None, module)
    meter.on_save_checkpoint(None, module, {})  # paused already
    assert waits.where == ["synchronize"]
