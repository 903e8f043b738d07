"""Run by a test: the same training as there, by two processes over gloo. CORPUS FOLDER [CHECKPOINT]."""

import atexit
import os
import sys
from pathlib import Path

from torch import distributed

from tests.test_training import TWO_PROCESSES, fit
from tst_lightning import Corpus, StepCheckpoint


def _process_groups_have_ended():
    if distributed.is_initialized():  # the interpreter may abort now and then
        sys.stderr.write("a process group is left\n")
        os._exit(3)


if __name__ == "__main__":
    atexit.register(_process_groups_have_ended)  # called after those that are registered later
    fit(
        Path(sys.argv[2]),
        Corpus.load(sys.argv[1]),
        **TWO_PROCESSES,
        callbacks=[StepCheckpoint(every_n_steps=1, keep=-1)],
        ckpt_path=sys.argv[3] or None,
        strategy="ddp",
        devices=2,
    )
