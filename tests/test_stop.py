"""A run that is told to stop goes on exactly; damaged checkpoints, full disks and time limits cost little."""

import os
import re
import resource
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Callback
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose

from tests.conftest import STEPS
from tests.runs import logged, run, run_ranks, start_ranks
from tests.test_resume import assert_same_run, newest
from tests.test_training import data, network, trainer
from tst_lightning import GracefulStop, StepCheckpoint, TSTModule, UserError
from tst_lightning.callbacks.stop import Stopped
from tst_lightning.checkpoints import checkpoint_fault, list_checkpoints, newest_whole, publish, set_aside
from tst_lightning.signals import SignalWatch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def uninterrupted(recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    status, output = run("fit", "--config", recipe, folder=folder)
    assert status == 0, output
    return folder / "run"


@pytest.fixture(scope="module")
def uninterrupted_in_two(recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted-two")
    statuses, outputs = run_ranks("fit", "--config", recipe, folder=folder)
    assert statuses == [0, 0], outputs
    return folder / "run"


def at(step, signum, **where):
    where = {"step": step, "signum": int(signum), **where}
    return [
        "--trainer.callbacks+=tests.runs.KillAt",
        *(f"--trainer.callbacks.{name}={value}" for name, value in where.items()),
    ]


@pytest.mark.parametrize(
    ("signum", "where", "saved", "workers"),
    [
        (signal.SIGTERM, {"step": 0}, 1, 0),
        (signal.SIGINT, {"step": 7, "micro_batch": 1}, 8, 2),  # a validation is due after this step
        (signal.SIGTERM, {"step": 11}, 12, 1),  # the last one before the switch, where one is due too
        (signal.SIGTERM, {"step": 16, "in_validation": True}, 16, 0),
        (signal.SIGINT, {"step": STEPS - 1}, STEPS, 0),  # only the closing validation is left
        (signal.SIGINT, {"step": STEPS, "in_validation": True}, STEPS, 0),
    ],
    ids=str,
)
def test_a_signal_stops_after_the_step_and_the_resume_is_exact(
    signum, where, saved, workers, recipe, uninterrupted, tmp_path
):
    arguments = ["fit", "--config", recipe, "--ckpt_path=last", "--data.num_workers", workers]
    status, output = run(*arguments, *at(signum=signum, **where), folder=tmp_path)
    assert status == 128 + signum, output
    line = (
        f"stopped by {signum.name} after step {saved} of {STEPS}: the same command with --ckpt_path last goes on from"
    )
    assert line in output and "Traceback" not in output, output
    assert newest(tmp_path / "run")["tst_lightning"]["step"] == saved
    assert not any(row.get("val/loss") for row in logged(tmp_path / "run") if int(row["step"]) == saved)
    status, output = run(*arguments, folder=tmp_path)
    assert status == 0, output
    assert_same_run(tmp_path / "run", uninterrupted)
    status, output = run(*arguments, folder=tmp_path)
    assert status == 0 and "nothing left to train" in output


def test_many_signals_one_after_the_other(recipe, uninterrupted, tmp_path):
    """Saved twice in one validation, in the next step, again: the stop checkpoints push no other one out."""
    arguments = ["fit", "--config", recipe, "--ckpt_path=last"]
    for step, where in [(4, {"in_validation": True}), (4, {"in_validation": True}), (4, {}), (5, {}), (21, {})]:
        status, output = run(*arguments, *at(step, signal.SIGTERM, **where), folder=tmp_path)
        assert status == 143, output
    names = [path.name for path in list_checkpoints(tmp_path / "run/checkpoints")]
    assert names == ["step-000000015.ckpt", "step-000000020.ckpt", "step-000000022.ckpt"]
    assert run(*arguments, folder=tmp_path)[0] == 0
    assert_same_run(tmp_path / "run", uninterrupted)


def test_a_validation_that_was_made_up_for_is_not_made_again(recipe, uninterrupted, tmp_path):
    """Step 20 is saved before its validation, then after it, and the next one is the newest in the third start."""
    arguments = ["fit", "--config", recipe, "--ckpt_path=last"]
    assert run(*arguments, *at(20, signal.SIGTERM, in_validation=True), folder=tmp_path)[0] == 143
    assert newest(tmp_path / "run")["validation_due"]
    assert run(*arguments, *at(20, signal.SIGKILL), folder=tmp_path)[0] == -signal.SIGKILL
    assert not newest(tmp_path / "run")["validation_due"]
    assert run(*arguments, folder=tmp_path)[0] == 0
    assert_same_run(tmp_path / "run", uninterrupted)


@pytest.mark.parametrize(
    ("signum", "where", "rank", "saved"),
    [
        (signal.SIGTERM, {"step": 2}, 1, 4),  # a step later, as the ranks must agree; a validation is due then
        (signal.SIGINT, {"step": 9, "micro_batch": 0}, 0, 11),
        (signal.SIGTERM, {"step": 12, "in_validation": True}, 1, 12),
        (signal.SIGTERM, {"step": STEPS - 1}, 1, STEPS),
    ],
    ids=str,
)
def test_a_signal_to_one_rank_of_two_stops_both_after_the_same_step(
    signum, where, rank, saved, recipe, uninterrupted_in_two, tmp_path
):
    arguments = ["fit", "--config", recipe, "--ckpt_path=last"]
    statuses, outputs = run_ranks(*arguments, *at(signum=signum, rank=rank, **where), folder=tmp_path)
    assert statuses == [128 + signum] * 2, outputs
    assert f"after step {saved} of {STEPS}" in outputs[0] and "stopped by" not in outputs[1]
    assert not any("Traceback" in output for output in outputs), outputs
    statuses, outputs = run_ranks(*arguments, folder=tmp_path)
    assert statuses == [0, 0], outputs
    assert_same_run(tmp_path / "run", uninterrupted_in_two)


# ---------------------------------------------------------------------------- at once


class Signals(Callback):
    """Sends this process signals as it comes to a hook for the n-th time, and then hangs if it should."""

    def __init__(self, hook: str, time: int = 1, count: int = 1, pause: float = 0.0, hang: bool = False) -> None:
        self.left = time

        def send(*_, **__):
            self.left -= 1
            if self.left == 0:
                for _ in range(count):
                    os.kill(os.getpid(), signal.SIGTERM)
                    sleep(pause)
                if hang:
                    sleep(60)

        setattr(self, hook, send)


def sleep(seconds):
    """Python would run its handlers in between; this does not come back before its time."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(left)


def signalled(recipe, folder, *arguments, **options):
    options = [f"--trainer.callbacks.{name}={value}" for name, value in options.items()]
    started = time.monotonic()
    status, output = run(
        "fit", "--config", recipe, "--ckpt_path=last", *arguments, "--trainer.callbacks+=tests.test_stop.Signals",
        *options, folder=folder,
    )  # fmt: skip
    assert time.monotonic() - started < 50, "it waited"
    assert "Traceback" not in output, output
    return status, output


def test_before_the_first_step_it_ends_at_once(recipe, uninterrupted, tmp_path):
    status, output = signalled(recipe, tmp_path, hook="on_fit_start", hang=True)
    assert status == 143 and "ended at once by SIGTERM" in output
    assert not list((tmp_path / "run/checkpoints").iterdir()) and not (tmp_path / "run/metrics.csv").exists()
    assert run("fit", "--config", recipe, "--ckpt_path=last", folder=tmp_path)[0] == 0
    assert_same_run(tmp_path / "run", uninterrupted)


def test_a_second_signal_ends_at_once_and_two_in_a_row_are_one(recipe, tmp_path):
    status, output = signalled(recipe, tmp_path, hook="on_train_batch_start", time=14, count=2, pause=1.1, hang=True)
    assert status == 143 and "ended at once by SIGTERM" in output and "stopped by" not in output
    assert [path.name for path in list_checkpoints(tmp_path / "run/checkpoints")] == ["step-000000005.ckpt"]
    status, output = signalled(recipe, tmp_path, hook="on_train_batch_start", time=2, count=2, pause=0.2)
    assert status == 143 and "stopped by SIGTERM after step 6" in output and "at once" not in output


def test_a_save_is_finished_first_and_what_a_killed_one_left_is_removed(recipe, uninterrupted, tmp_path):
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/checkpoints/step-000000010.ckpt.tmp").write_bytes(b"half")
    status, output = signalled(recipe, tmp_path, hook="on_save_checkpoint")
    assert status == 143 and "stopped by SIGTERM after step 6" in output
    names = [path.name for path in sorted((tmp_path / "run/checkpoints").iterdir())]
    assert names == ["step-000000005.ckpt", "step-000000006.ckpt"]
    assert run("fit", "--config", recipe, "--ckpt_path=last", folder=tmp_path)[0] == 0
    assert_same_run(tmp_path / "run", uninterrupted)


def test_a_signal_after_the_last_validation_batch_lets_the_run_end(recipe, uninterrupted, tmp_path):
    status, output = signalled(recipe, tmp_path, hook="on_train_end")
    assert status in (0, 143), output
    assert_same_run(tmp_path / "run", uninterrupted)


def test_a_rank_that_waits_for_the_others_ends_at_once(recipe, tmp_path):
    """In the rendezvous the main thread is inside PyTorch, where Python runs no handlers."""
    process = start_ranks("fit", "--config", recipe, folder=tmp_path, only=[0])[0]
    deadline = time.monotonic() + 60
    while not (tmp_path / "run/.lock").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1)
    process.terminate()
    process.join(timeout=10)
    assert process.exitcode == 143


def spawned(recipe, folder, *arguments, until="held-out loss"):
    """The command as a user starts it, in a process group of its own, at its first held-out loss."""
    command = [sys.executable, "-m", "tst_lightning", "fit", "--config", str(recipe), "--trainer.max_steps=100000"]
    process = subprocess.Popen(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder, text=True,
        start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    seen = []
    for line in process.stdout if until else ():
        seen.append(line)
        if until in line:
            break
    assert process.poll() is None, "".join(seen)
    return process


def children_of(process):
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_loader_processes_live_until_the_step_is_done(signum, recipe, tmp_path):
    process = spawned(recipe, tmp_path, "--data.num_workers=2")
    os.killpg(process.pid, signum)
    output = process.stdout.read()
    assert process.wait(timeout=60) == 128 + signum, output
    assert f"stopped by {signum.name}" in output and "worker" not in output, output


@pytest.mark.parametrize("to", ["rank 1", "all"])
def test_the_launchers_ranks_end_with_the_same_status(to, recipe, tmp_path):
    process = spawned(recipe, tmp_path, "--trainer.strategy=ddp", "--trainer.devices=2")
    children = children_of(process)
    assert len(children) == 1
    if to == "all":
        os.killpg(process.pid, signal.SIGTERM)
    else:
        os.kill(children[0], signal.SIGTERM)
    output = process.stdout.read()  # until both have closed it
    assert process.wait(timeout=60) == 143, output
    assert output.count("stopped by SIGTERM") == 1 and "Traceback" not in output, output


@pytest.mark.parametrize("who", [0, 1])
def test_the_launchers_ranks_end_at_once_before_the_first_step(who, recipe, tmp_path):
    """The second rank is still importing, and the first waits for it inside PyTorch."""
    process = spawned(recipe, tmp_path, "--trainer.strategy=ddp", "--trainer.devices=2", until=None)
    deadline = time.monotonic() + 60
    while not (children := children_of(process)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1.5)
    os.kill([process.pid, *children][who], signal.SIGTERM)
    started = time.monotonic()
    output = process.stdout.read()
    assert process.wait(timeout=60) == 143 and time.monotonic() - started < 10, output
    assert not list((tmp_path / "run/checkpoints").iterdir())


def test_the_watch_gives_everything_back():
    before = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]
    with SignalWatch():
        assert signal.getsignal(signal.SIGTERM) != before[1]
    assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.set_wakeup_fd(-1) == -1


# ---------------------------------------------------------------------------- in a notebook


class Interrupt(Callback):
    def __init__(self, signals):
        self.signals = signals

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 2:
            for pause in self.signals:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(pause)


def in_notebook(corpus, folder, *callbacks, **options):
    run = trainer(folder, 8, callbacks=[*callbacks], enable_checkpointing=True, **options)
    run.fit(TSTModule(network()), data(corpus), ckpt_path=next(iter(list_checkpoints(folder / "checkpoints")), None))


@pytest.mark.parametrize(("signals", "error"), [([0.0], Stopped), ([1.1, 0.0], KeyboardInterrupt)], ids=str)
def test_the_callback_by_hand_gives_the_handlers_back(signals, error, text_corpus, tmp_path):
    before = signal.getsignal(signal.SIGINT)
    in_notebook(text_corpus, tmp_path / "whole", StepCheckpoint(), GracefulStop())
    assert signal.getsignal(signal.SIGINT) is before
    try:
        with pytest.raises(SystemExit) as stop:  # Lightning makes one of KeyboardInterrupt
            in_notebook(text_corpus, tmp_path / "a", GracefulStop(), StepCheckpoint(), Interrupt(signals))
        if error is Stopped:
            assert isinstance(stop.value, Stopped) and stop.value.code == 130
            assert signal.getsignal(signal.SIGINT) is before
            in_notebook(text_corpus, tmp_path / "a", StepCheckpoint(), GracefulStop())
            assert logged(tmp_path / "a") == logged(tmp_path / "whole")
        else:
            assert not isinstance(stop.value, Stopped) and not list_checkpoints(tmp_path / "a/checkpoints")
    finally:
        signal.signal(signal.SIGINT, before)


class Handlers(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.usr1, self.term = signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGTERM)


def test_slurms_requeue_signal_stays_lightnings(text_corpus, tmp_path, monkeypatch):
    for name, value in {"PROCID": 0, "LOCALID": 0, "NODEID": 0, "NTASKS": 1, "JOB_ID": 7}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    before = [signal.getsignal(signum) for signum in (signal.SIGUSR1, signal.SIGTERM)]
    handlers, stop = Handlers(), GracefulStop()
    in_notebook(text_corpus, tmp_path, StepCheckpoint(), stop, handlers, plugins=[SLURMEnvironment()])
    assert isinstance(handlers.usr1, _HandlersCompose) and handlers.term == stop._note
    assert [signal.getsignal(signum) for signum in (signal.SIGUSR1, signal.SIGTERM)] == before


def test_it_needs_something_to_save_with(text_corpus, tmp_path):
    with pytest.raises(UserError, match="add a StepCheckpoint"):
        in_notebook(text_corpus, tmp_path, GracefulStop())


# ---------------------------------------------------------------------------- max_time


class Slow(Callback):
    """Each micro-batch takes its time, and the clock of the time limit with it."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        time.sleep(0.15)


def test_a_chain_of_jobs_with_a_time_limit_comes_to_its_end_exactly(recipe, uninterrupted, tmp_path):
    arguments = ["fit", "--config", recipe, "--ckpt_path=last", "--trainer.callbacks+=tests.test_stop.Slow"]
    steps = []
    for _ in range(12):
        status, output = run(*arguments, "--trainer.max_time=00:00:00:01", folder=tmp_path)
        assert status == 0, output
        stopped = re.search(rf"stopped at step (\d+) of {STEPS}: --ckpt_path last goes on", output)
        if stopped is None:
            break
        steps.append(int(stopped[1]))
        assert newest(tmp_path / "run")["tst_lightning"]["step"] == steps[-1]
    assert len(steps) >= 3 and steps == sorted(set(steps)) and "nothing left" not in output
    assert_same_run(tmp_path / "run", uninterrupted)


# ---------------------------------------------------------------------------- damaged checkpoints


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1000])


def empty(path):
    path.write_bytes(b"")


def flip(path):
    """One byte inside a tensor."""
    with zipfile.ZipFile(path) as archive:
        tensor = max(archive.infolist(), key=lambda record: record.file_size)
    content = bytearray(path.read_bytes())
    content[tensor.header_offset + tensor.file_size // 2] ^= 255
    path.write_bytes(content)


def foreign(path):
    torch.save({"state_dict": {}}, path)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, "is not a whole checkpoint"),
        (empty, "is not a whole checkpoint"),
        (flip, "does not have its checksum"),
        (foreign, "was not saved by a TST run"),
    ],
)
def test_last_falls_back_to_the_newest_whole_one(damage, reason, recipe, uninterrupted, tmp_path):
    arguments = ["fit", "--config", recipe, "--ckpt_path=last"]
    assert run(*arguments, *at(21, signal.SIGTERM), folder=tmp_path)[0] == 143
    folder = tmp_path / "run/checkpoints"
    damage(folder / "step-000000022.ckpt")
    assert checkpoint_fault(folder / "step-000000020.ckpt") is None
    damaged = (folder / "step-000000022.ckpt").read_bytes()

    status, output = run(*arguments, "--ckpt_path", folder / "step-000000022.ckpt", folder=tmp_path)
    assert status == 2 and reason in output and "Traceback" not in output, output
    status, output = run("validate", "--config", recipe, "--ckpt_path=last", folder=tmp_path)
    assert status == 0 and reason in output and (folder / "step-000000022.ckpt").exists(), output
    status, output = run(*arguments, folder=tmp_path)
    assert status == 0 and reason in output and "is now step-000000022.ckpt.damaged" in output, output
    aside = folder / "step-000000022.ckpt.damaged"
    assert aside.read_bytes() == damaged
    aside.unlink()
    assert_same_run(tmp_path / "run", uninterrupted)


def test_two_ranks_fall_back_to_the_same_one(recipe, tmp_path):
    arguments = ["fit", "--config", recipe, "--ckpt_path=last"]
    assert run_ranks(*arguments, *at(20, signal.SIGTERM), folder=tmp_path)[0] == [143, 143]
    truncate(list_checkpoints(tmp_path / "run/checkpoints")[-1])
    statuses, outputs = run_ranks(*arguments, folder=tmp_path)
    assert statuses == [0, 0], outputs
    assert "is now" in outputs[0] and "is now" not in outputs[1]


def test_where_none_is_whole_nothing_is_begun_and_nothing_is_moved(recipe, tmp_path):
    folder = tmp_path / "run/checkpoints"
    folder.mkdir(parents=True)
    (folder / "step-000000005.ckpt").write_bytes(b"nothing")
    status, output = run("fit", "--config", recipe, "--ckpt_path=last", folder=tmp_path)
    assert status == 2 and "no checkpoint in run/checkpoints is whole" in output, output
    assert [path.name for path in folder.iterdir()] == ["step-000000005.ckpt"]


def test_several_damaged_ones_and_names_that_are_taken(tmp_path):
    paths = [tmp_path / f"step-{step}.ckpt" for step in (1, 2, 3)]
    torch.save({"tst_lightning": {"step": 1}}, paths[0])
    for path in paths[1:]:
        path.write_bytes(b"nothing")
    whole, damaged = newest_whole(list_checkpoints(tmp_path))
    assert whole == paths[0] and list(damaged) == [paths[2], paths[1]]
    (tmp_path / "step-3.ckpt.damaged").write_bytes(b"an earlier one")
    assert set_aside(paths[2]).name == "step-3.ckpt.damaged-1"
    assert newest_whole([tmp_path / "step-9.ckpt"])[0] is None  # gone in the meantime


def test_a_sharded_checkpoint_is_published_whole(tmp_path):
    unfinished, path = tmp_path / "step-1.ckpt.tmp", tmp_path / "step-1.ckpt"
    for _ in range(2):  # the second takes the first one's place
        unfinished.mkdir()
        torch.save({"tst_lightning": {"step": 1}}, unfinished / "meta.pt")
        assert "is not a whole checkpoint" in checkpoint_fault(unfinished)
        publish(unfinished, path)
    assert [file.name for file in path.iterdir()] == ["meta.pt"] and not unfinished.exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_disk_that_is_full_is_one_clear_line(ranks, recipe, tmp_path):
    arguments = ["fit", "--config", recipe, "--ckpt_path=last"]
    start = at(5, signal.SIGTERM)
    if ranks == 1:
        assert run(*arguments, *start, folder=tmp_path)[0] == 143
        limited = ["--trainer.callbacks+=tests.test_stop.SmallDisk"]
        status, output = run(*arguments, *limited, folder=tmp_path)
        statuses, outputs = [status], [output]
    else:
        assert run_ranks(*arguments, *start, folder=tmp_path)[0] == [143, 143]
        statuses, outputs = run_ranks(*arguments, "--trainer.callbacks+=tests.test_stop.SmallDisk", folder=tmp_path)
    assert statuses == [1] * ranks, outputs
    saved = [path.name for path in (tmp_path / "run/checkpoints").iterdir()]
    newest_saved = max(saved)
    assert "error: run/checkpoints/step-000000010.ckpt could not be saved (File too large): make room" in outputs[0]
    assert f"--ckpt_path last goes on from {newest_saved}" in outputs[0]
    assert "Traceback" not in "".join(outputs) and "error" not in "".join(outputs[1:]), outputs
    assert not any(name.endswith(".tmp") for name in saved) and "step-000000010.ckpt" not in saved
    assert checkpoint_fault(tmp_path / "run/checkpoints" / newest_saved) is None


class SmallDisk(Callback):
    """Files beyond a size fail, as on a full disk, but with another word for it."""

    def on_train_start(self, trainer, pl_module):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
