"""Shared fixtures: real text, prepared once a session."""

import sysconfig
from pathlib import Path

import pytest

from tst_lightning.data.corpus import Corpus

VOCABULARY = 320


@pytest.fixture(scope="session")
def text_corpus(tmp_path_factory) -> Corpus:
    """A dozen modules of the standard library, tokenised: about 120k tokens."""
    from tst_lightning.data.prepare import prepare

    stdlib = Path(sysconfig.get_path("stdlib"))
    names = [
        "abc",
        "argparse",
        "ast",
        "bisect",
        "calendar",
        "cmd",
        "codecs",
        "copy",
        "csv",
        "dis",
        "heapq",
        "random",
    ]
    return prepare(
        [stdlib / f"{name}.py" for name in names],
        tmp_path_factory.mktemp("corpus") / "stdlib",
        train_tokenizer=VOCABULARY,
        held_out=0.02,
    )
