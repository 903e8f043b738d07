"""A run killed anywhere goes on exactly as if it had never been stopped."""

import csv
import signal
from pathlib import Path

import pytest
import torch

from tests.conftest import STEPS, SWITCH
from tests.runs import is_clocked, logged, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def uninterrupted(recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    status, output = run("fit", "--config", recipe, folder=folder)
    assert status == 0, output
    return folder / "run"


def events(directory):
    """Every (tag, step, value) in the event files but what was measured on the clock; repeats would show."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found = []
    for path in sorted(Path(directory).glob("events.out.tfevents.*")):
        for event in EventFileLoader(str(path)).Load():
            found += [
                (v.tag, event.step, str([*v.tensor.float_val, *v.tensor.string_val]))
                for v in event.summary.value
                if not is_clocked(v.tag)
            ]
    return sorted(found)


def newest(directory):
    return torch.load(max((directory / "checkpoints").iterdir()), weights_only=True)


def assert_same_run(resumed, expected):
    assert logged(resumed) == logged(expected)
    assert events(resumed) == events(expected)
    a, b = newest(resumed), newest(expected)
    assert a["state_dict"].keys() == b["state_dict"].keys()
    for name, tensor in a["state_dict"].items():
        assert torch.equal(tensor, b["state_dict"][name]), name
    for key in ("optimizer_states", "lr_schedulers"):
        assert repr(a[key]) == repr(b[key])
    assert sorted(p.name for p in (resumed / "checkpoints").iterdir()) == sorted(
        p.name for p in (expected / "checkpoints").iterdir()
    )


def test_the_uninterrupted_run_is_whole(uninterrupted):
    with (uninterrupted / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    train = [row for row in rows if row["tokens/data"]]
    assert [int(row["step"]) for row in train] == list(range(1, STEPS + 1))
    assert [int(row["step"]) for row in rows if row["val/loss"]] == [4, 8, 12, 16, 20, 24]
    per_step = 4 * 32
    for row in train:
        step = int(row["step"])
        read = 4 * step if step <= SWITCH else 4 * SWITCH + (step - SWITCH)
        assert int(row["tokens/data"]) == read * per_step and int(row["tokens/latent"]) == step * per_step
        assert bool(row["train/superposition_loss"]) == (step <= SWITCH)
        assert bool(row["train/loss"]) == (step > SWITCH)
        assert int(row["phase/bag_size"]) == (4 if step <= SWITCH else 1)
        assert float(row["grad_norm"]) > 0
        assert float(row["throughput/step_time"]) > 0 and float(row["throughput/data_tokens_per_second"]) > 0
    assert float(train[0]["lr"]) == pytest.approx(1e-3 / 4) and float(train[3]["lr"]) == pytest.approx(1e-3)
    for row in rows:
        if row["val/loss"]:
            assert float(row["val/perplexity"]) == pytest.approx(2.718281828 ** float(row["val/loss"]), rel=1e-5)
    clock = [float(row["time/wall_clock"]) for row in train]
    assert clock == sorted(clock) and clock[0] > 0
    columns = {name for name in rows[0] if not is_clocked(name)} - {"step"}
    assert {tag for tag, _, _ in events(uninterrupted)} == columns | {"samples/text_summary"}


KILLS = [
    {"step": 3},  # before the first checkpoint
    {"step": 8, "micro_batch": 1},  # in mid-accumulation, superposition
    {"step": SWITCH - 1, "micro_batch": 1},  # the last micro-batch before the switch
    {"step": SWITCH},  # the first after it
    {"step": SWITCH + 1, "micro_batch": 1},
    {"step": 20, "in_validation": True},  # in the validation that its checkpoint waits for
]


@pytest.mark.parametrize(("kill", "workers"), [*zip(KILLS, [0, 1, 2, 0, 2, 0], strict=True)], ids=str)
def test_killed_and_resumed(kill, workers, recipe, uninterrupted, tmp_path):
    options = [f"--trainer.callbacks.{name}={value}" for name, value in kill.items()]
    arguments = ["fit", "--config", recipe, "--data.num_workers", workers, "--ckpt_path=last"]
    status, output = run(*arguments, "--trainer.callbacks+=tests.runs.KillAt", *options, folder=tmp_path)
    assert status == -signal.SIGKILL, output
    status, output = run(*arguments, folder=tmp_path)
    assert status == 0, output
    assert_same_run(tmp_path / "run", uninterrupted)


def test_killed_at_every_one_of_them_in_turn(recipe, uninterrupted, tmp_path):
    status, output = -signal.SIGKILL, ""
    for kill in KILLS:
        options = [f"--trainer.callbacks.{name}={value}" for name, value in kill.items()]
        status, output = run(
            "fit", "--config", recipe, "--ckpt_path=last", "--trainer.callbacks+=tests.runs.KillAt", *options,
            folder=tmp_path,
        )  # fmt: skip
        assert status == -signal.SIGKILL, output
    status, output = run("fit", "--ckpt_path=run", folder=tmp_path)  # the run's own recipe
    assert status == 0, output
    assert_same_run(tmp_path / "run", uninterrupted)
    names = {path.name for path in (tmp_path / "run").glob("*.yaml")}
    assert {"config.yaml", "config-resume-1.yaml", "config-resume-2.yaml"} <= names

    status, output = run("fit", "--ckpt_path=run", folder=tmp_path)
    assert status == 0 and "nothing left to train" in output


def test_what_is_refused(recipe, uninterrupted, tmp_path):
    def refused(*arguments):
        before = {p: p.stat().st_mtime_ns for p in uninterrupted.rglob("*")}
        status, output = run("fit", "--config", recipe, *arguments, folder=uninterrupted.parent)
        assert status == 2 and "Traceback" not in output, output
        assert before == {p: p.stat().st_mtime_ns for p in uninterrupted.rglob("*")}, "something was written"
        return output

    output = refused("--ckpt_path=last", "--phases.ratio=0.25", "--data.seed=6")
    assert "bag 4 for steps 0-11, bag 1 for steps 12-23" in output and "bag 4 for steps 0-5" in output
    assert "data.seed was 5" in output and "is 6 here" in output
    assert "trainer.max_steps" in refused("--ckpt_path=last", "--trainer.max_steps=30")
    assert "already holds a run" in refused()
    assert "no such checkpoint" in refused("--ckpt_path=elsewhere.ckpt")
    truncated = tmp_path / "truncated.ckpt"
    truncated.write_bytes(max((uninterrupted / "checkpoints").iterdir()).read_bytes()[:1000])
    fork = "--trainer.default_root_dir=fork"
    assert "beside" in refused(f"--ckpt_path={truncated}")  # its logs would be taken back to another run's place
    assert "not a whole checkpoint" in refused(f"--ckpt_path={truncated}", fork)
    torch.save({"state_dict": {}}, truncated)
    assert "was not saved by a TST run" in refused(f"--ckpt_path={truncated}", fork)
    assert not (uninterrupted.parent / "fork").exists()
    for change, difference in (
        ("--model.optimizer.lr=0.5", "optimisation.optimizer.lr was 0.001 in the checkpoint's run and is 0.5 here"),
        ("--model.optimizer=torch.optim.SGD", "optimisation.optimizer was torch.optim.adamw.AdamW"),
        ("--model.weighting=first", "optimisation.weighting was uniform"),
        ("--trainer.gradient_clip_val=2", "optimisation.gradient_clip_val was 1.0"),
        ("--model.network.init_args.config.hidden_size=32", "network.hidden_size was 16"),
        ("--data.latent_length=16", "data.latent_length was 32"),
    ):
        assert difference in refused("--ckpt_path=last", change)


def test_validate_gives_the_last_held_out_loss_again(recipe, uninterrupted):
    status, output = run(
        "validate",
        "--config",
        recipe,
        "--ckpt_path=last",
        "--trainer.logger=false",
        folder=uninterrupted.parent,
    )
    assert status == 0, output
    with (uninterrupted / "metrics.csv").open(newline="") as file:
        last = list(csv.DictReader(file))[-1]
    assert f"held-out loss {float(last['val/loss']):.4f}" in output
