"""Run the command line in processes forked from one that has imported everything already."""

import csv
import multiprocessing
import os
import signal
import sys
import traceback

from lightning.pytorch import Callback

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.runs", "tst_lightning.cli", "litdata", "torch.utils.tensorboard"])


class KillAt(Callback):
    """SIGKILL to this very process as it begins a micro-batch, or a validation, of a step."""

    def __init__(self, step: int, micro_batch: int = 0, in_validation: bool = False) -> None:
        self.step, self.micro_batch, self.in_validation = step, micro_batch, in_validation

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        here = (trainer.global_step, batch_idx % trainer.accumulate_grad_batches)
        if not self.in_validation and here == (self.step, self.micro_batch):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if self.in_validation and trainer.global_step == self.step and batch_idx == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def _main(arguments, folder, output):
    import torch

    from tst_lightning.__main__ import main

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


def run(*arguments, folder):
    """Run ``tst-lightning ARGUMENTS`` in ``folder``.

    Returns the exit status (negative: the signal that ended it) and what it printed.
    """
    output = os.path.join(folder, "output.txt")
    process = SERVER.Process(target=_main, args=([str(a) for a in arguments], str(folder), output))
    process.start()
    process.join(timeout=300)
    assert process.exitcode is not None, "the run hangs"
    with open(output) as file:
        return process.exitcode, file.read()


def is_clocked(name):
    """Whether a metric was measured on the clock, and so differs between runs that are otherwise the same."""
    return name.startswith(("throughput/", "time/"))


def logged(directory):
    """The rows of a run's ``metrics.csv`` that are fixed by its recipe, as written."""
    with open(os.path.join(directory, "metrics.csv"), newline="") as file:
        return [{name: value for name, value in row.items() if not is_clocked(name)} for row in csv.DictReader(file)]
