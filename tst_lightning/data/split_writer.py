"""One split on disk: a flat stream of tokens, as a LitData directory of records."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tst_lightning.data.corpus import Split, split_faults
from tst_lightning.data.parts import UNKNOWN_BYTES

CHUNK_BYTES = 64_000_000


class SplitWriter:
    """Writes documents as records of ``record_tokens``, counts them and hashes their tokens.

    It holds a chunk in memory, no more.

    Args:
        directory: to be made.
        dtype: of the ids.
        record_tokens: tokens a record, of all but the last.
    """

    def __init__(self, directory: Path, dtype: str, record_tokens: int) -> None:
        from litdata.streaming import Cache, TemporalArrayLoader

        self.max_token_id = 0
        self._directory = directory
        self._cache = Cache(str(directory), chunk_bytes=CHUNK_BYTES, item_loader=TemporalArrayLoader())
        self._record_tokens = record_tokens
        self._record: list[NDArray[Any]] = []  # of the present record
        self._held = 0  # tokens in it
        self._records = 0
        self._dtype = dtype
        self._documents = self._tokens = self._bytes = 0
        self._bytes_known = True
        self._hash = hashlib.sha256()

    def add(self, ids: NDArray[Any], lengths: NDArray[np.int64]) -> None:
        """Append whole documents: their ids, and (tokens, bytes of text) of each."""
        self._documents += len(lengths)
        self._tokens += len(ids)
        self._bytes += int(lengths[:, 1].sum())
        self._bytes_known &= not (lengths[:, 1] == UNKNOWN_BYTES).any()
        self.max_token_id = max(self.max_token_id, int(ids.max(initial=0)))
        while len(ids):
            stretch = ids[: self._record_tokens - self._held]
            ids = ids[len(stretch) :]
            self._record.append(np.array(stretch))  # a copy: the map that it lies in can be closed
            self._held += len(stretch)
            if self._held == self._record_tokens:
                self._write()

    def finish(self) -> Split:
        """Write what is left.

        Raises:
            RuntimeError: if LitData lost records.
        """
        if self._held:
            self._write()
        self._cache.done()
        self._cache.merge()
        faults = split_faults(
            self._directory, tokens=self._tokens, record_tokens=self._record_tokens, dtype=self._dtype
        )
        if faults:
            raise RuntimeError(f"LitData did not write all of the {self._directory.name} split: {'; '.join(faults)}")
        self._fix_index()
        return Split(
            documents=self._documents,
            tokens=self._tokens,
            bytes=self._bytes if self._bytes_known else None,
            sha256=self._hash.hexdigest(),
        )

    def _write(self) -> None:
        record = np.concatenate(self._record)
        self._hash.update(record.data)
        self._cache[self._records] = {"tokens": record}
        self._records += 1
        self._record, self._held = [], 0

    def _fix_index(self) -> None:
        """Let the same tokens give the same file: LitData puts the time in, to tell a changed corpus from a cached."""
        path = self._directory / "index.json"
        index = json.loads(path.read_text(encoding="utf-8"))
        index["updated_at"] = self._hash.hexdigest()
        path.write_text(json.dumps(index, sort_keys=True), encoding="utf-8")
