"""Token directories for tests, written in one process through LitData's own writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from litdata.streaming import Cache, TemporalArrayLoader


def write_tokens(directory: Path, tokens: np.ndarray[Any, Any], *, record_tokens: int = 2**20) -> None:
    """Write a flat stream of tokens as records of ``record_tokens``, two records a chunk."""
    cache = Cache(str(directory), chunk_size=2, item_loader=TemporalArrayLoader())
    for record, start in enumerate(range(0, len(tokens), record_tokens)):
        cache[record] = {"tokens": tokens[start : start + record_tokens]}
    cache.done()
    cache.merge()
