"""Run the command line in processes forked from one that has imported everything already."""

import csv
import multiprocessing
import os
import signal
import socket
import sys
import traceback

from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_only

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.runs", "tst_lightning.cli", "litdata", "torch.utils.tensorboard"])


class KillAt(Callback):
    """A signal, SIGKILL by default, to this very process as it begins a micro-batch, or a validation, of a step."""

    def __init__(
        self,
        step: int,
        micro_batch: int = 0,
        in_validation: bool = False,
        signum: int = int(signal.SIGKILL),
        rank: int = 0,
    ) -> None:
        self.step, self.micro_batch, self.in_validation = step, micro_batch, in_validation
        self.signum, self.rank = signum, rank

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        here = (trainer.global_step, batch_idx % trainer.accumulate_grad_batches)
        if not self.in_validation and here == (self.step, self.micro_batch):
            self._kill(trainer)

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if self.in_validation and trainer.global_step == self.step and batch_idx == 1:
            self._kill(trainer)

    def _kill(self, trainer):
        if trainer.global_rank == self.rank:
            os.kill(os.getpid(), self.signum)


def _main(arguments, folder, output, environment):
    import torch

    from tst_lightning.__main__ import main

    os.environ |= environment
    rank_zero_only.rank = int(environment.get("RANK", 0))  # Lightning has read it when it was imported
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    torch.set_num_threads(1)
    # else loader processes would come from a fork server of their own, as they never do for a user
    multiprocessing.set_start_method("fork", force=True)
    try:
        status = main(arguments)
    except SystemExit as stop:  # the parser's
        status = int(stop.code or 0)
    except BaseException:  # noqa: BLE001 (whatever it is, the test should see it)
        traceback.print_exc()
        status = 70
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def start(*arguments, folder, output="output.txt", environment=None):
    """Start ``tst-lightning ARGUMENTS`` in ``folder``, where ``output`` gets what it prints."""
    output = os.path.join(folder, output)
    process = SERVER.Process(target=_main, args=([str(a) for a in arguments], str(folder), output, environment or {}))
    process.start()
    return process


def start_ranks(*arguments, folder, ranks=2, only=None, strategy="ddp"):
    """Start the command line in several processes over gloo, each with the environment that torchrun gives it."""
    port = free_port()
    name = "strategy.class_path" if "." in strategy and "{" not in strategy else "strategy"
    return [
        start(
            *arguments, f"--trainer.{name}={strategy}", f"--trainer.devices={ranks}", folder=folder,
            output=f"output-{rank}.txt",
            environment={
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "RANK": str(rank),
                "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "NODE_RANK": "0",
            },
        )
        for rank in only or range(ranks)
    ]  # fmt: skip


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(*arguments, folder, ranks=2, strategy="ddp"):
    """Run the command line in several processes; returns the exit status and the output of each."""
    processes = start_ranks(*arguments, folder=folder, ranks=ranks, strategy=strategy)
    for process in processes:
        process.join(timeout=300)
    assert all(process.exitcode is not None for process in processes), "a rank hangs"
    outputs = []
    for rank in range(ranks):
        with open(os.path.join(folder, f"output-{rank}.txt")) as file:
            outputs.append(file.read())
    return [process.exitcode for process in processes], outputs


def run(*arguments, folder):
    """Run ``tst-lightning ARGUMENTS`` in ``folder``.

    Returns the exit status (negative: the signal that ended it) and what it printed.
    """
    process = start(*arguments, folder=folder)
    process.join(timeout=300)
    assert process.exitcode is not None, "the run hangs"
    with open(os.path.join(folder, "output.txt")) as file:
        return process.exitcode, file.read()


def is_clocked(name):
    """Whether a metric was measured on the clock, and so differs between runs that are otherwise the same."""
    return name.startswith(("throughput/", "time/"))


def logged(directory):
    """The rows of a run's ``metrics.csv`` that are fixed by its recipe, as written."""
    with open(os.path.join(directory, "metrics.csv"), newline="") as file:
        return [{name: value for name, value in row.items() if not is_clocked(name)} for row in csv.DictReader(file)]
