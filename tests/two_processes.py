"""Run by a test: the same training as there, by two processes over gloo. CORPUS FOLDER [CHECKPOINT]."""

import sys
from pathlib import Path

from tests.test_training import TWO_PROCESSES, fit
from tst_lightning import Corpus, StepCheckpoint

if __name__ == "__main__":
    fit(
        Path(sys.argv[2]),
        Corpus.load(sys.argv[1]),
        **TWO_PROCESSES,
        callbacks=[StepCheckpoint(every_n_steps=1, keep=-1)],
        ckpt_path=sys.argv[3] or None,
        strategy="ddp",
        devices=2,
    )
