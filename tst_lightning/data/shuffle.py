"""Documents in a seeded order, in constant memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tst_lightning.data.permutation import Permutation

_GATHER_TOKENS = 1 << 22


class Shuffler:
    """Takes documents in one order and gives them in another; between the two they lie in files.

    Args:
        scratch: an existing directory for the files.
        dtype: of the ids.
    """

    def __init__(self, scratch: Path, dtype: str) -> None:
        self.bytes = 0
        self._dtype = np.dtype(dtype)
        self._tokens = (scratch / "shuffle.tokens").open("w+b")
        self._rows = (scratch / "shuffle.rows").open("w+b")  # of each document: first token, tokens, bytes of text
        self._count = 0

    def add(self, ids: NDArray[Any], lengths: NDArray[np.int64]) -> None:
        """Take whole documents: their ids, and (tokens, bytes of text) of each."""
        first = self.bytes // self._dtype.itemsize
        rows = np.column_stack([first + lengths[:, 0].cumsum() - lengths[:, 0], lengths])
        self._tokens.write(ids.tobytes())
        self._rows.write(rows.astype(np.int64).tobytes())
        self.bytes += ids.nbytes
        self._count += len(lengths)

    def documents(self, seed: int) -> Iterator[tuple[NDArray[Any], NDArray[np.int64]]]:
        """All of them in an order that the seed fixes, some at a time, as :meth:`add` takes them."""
        for file in (self._tokens, self._rows):
            file.flush()
        ids = np.memmap(self._tokens, dtype=self._dtype, mode="r")
        rows = np.memmap(self._rows, dtype=np.int64, mode="r", shape=(self._count, 3))
        order = Permutation(self._count, seed)
        gathered: list[NDArray[Any]] = []
        lengths: list[NDArray[np.int64]] = []
        size = 0
        for place in range(self._count):
            start, length, _ = row = rows[order(place)]
            gathered.append(ids[start : start + length])
            lengths.append(row[1:])
            size += length
            if size >= _GATHER_TOKENS or place == self._count - 1:
                yield np.concatenate(gathered), np.stack(lengths)
                gathered, lengths, size = [], [], 0
        del ids, rows
        self._tokens.close()
        self._rows.close()
