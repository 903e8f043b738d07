"""Run by a test: the same training as there, by two processes over gloo."""

import sys
from pathlib import Path

from tests.test_training import fit
from tst_lightning import Corpus, Phases

if __name__ == "__main__":
    fit(
        Path(sys.argv[2]),
        Corpus.load(sys.argv[1]),
        Phases(bag_size=4, ratio=0.5),
        val_check_interval=4,
        data_options={"val_batch_size": 3},
        strategy="ddp",
        devices=2,
    )
