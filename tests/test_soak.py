"""A short soak: killed ten times at seeded moments, the run equals one that was left alone."""

import sysconfig
from pathlib import Path

import pytest

from tests.soak import PLACES, corpora_of, page, soak


@pytest.mark.slow
def test_ten_kills(tmp_path):
    corpora = corpora_of(Path(sysconfig.get_path("stdlib")), tmp_path)
    kills = soak(corpora, tmp_path, kills=10, seed=1)
    met = {kill.met.split()[0] for kill in kills}
    assert len(met & set(PLACES[:4])) >= 3, [kill.met for kill in kills]
    assert len({kill.resumed_at for kill in kills}) >= 4  # it got on in between
    text = page(kills, seed=1, seconds=1.0, steps=50)
    assert text.count("\n| ") == 11 and "SIGKILL to" in text
