"""Tokenised text on its way into a corpus: parts on disk, each of them whole or not there.

A part is three files: ``NUMBER.tokens``, the ids of its documents, each closed by the end-of-text token, as raw
little-endian integers; ``NUMBER.documents.npy``, for each document its tokens and its bytes of text; and
``NUMBER.json``, written last, which vouches for the other two.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tst_lightning.data.corpus import file_sha256
from tst_lightning.errors import UserError

UNKNOWN_BYTES = -1
NAMES_SHOWN = 3

Skipped = dict[str, tuple[int, list[str]]]
"""Why documents were left out: how many, and the first few by name."""


@dataclass(frozen=True)
class Part:
    """A finished part.

    Attributes:
        directory: where its files are.
        number: its place among the parts of the same input.
        dtype: of the ids.
        documents: how many it holds.
        tokens: of all of them, end-of-text included.
        max_token_id: the largest id in it, -1 if it is empty.
        first_document: name of the first one.
        skipped: what was left out.
        tokens_sha256: hash of the file of tokens.
        documents_sha256: hash of the file of documents.
    """

    directory: Path
    number: int
    dtype: str
    documents: int
    tokens: int
    max_token_id: int
    first_document: str | None
    skipped: Skipped
    tokens_sha256: str
    documents_sha256: str

    @property
    def nbytes(self) -> int:
        """Bytes that the ids take."""
        return self.tokens * np.dtype(self.dtype).itemsize

    def ids(self) -> NDArray[Any]:
        """The ids, memory-mapped."""
        if not self.tokens:  # an empty file cannot be mapped
            return np.empty(0, dtype=self.dtype)
        return np.memmap(_path(self.directory, self.number, "tokens"), dtype=self.dtype, mode="r")

    def lengths(self) -> NDArray[np.int64]:
        """(N, 2): tokens and bytes of text of every document; :data:`UNKNOWN_BYTES` where only the tokens are known."""
        lengths: NDArray[np.int64] = np.load(_path(self.directory, self.number, "documents.npy"), allow_pickle=False)
        return lengths

    def fault(self) -> str | None:
        """What is wrong with its files; reads all of them."""
        for suffix, digest in (("tokens", self.tokens_sha256), ("documents.npy", self.documents_sha256)):
            path = _path(self.directory, self.number, suffix)
            if not path.is_file():
                return f"{path} is missing"
            if file_sha256(path) != digest:
                return f"{path} is damaged (its hash differs)"
        return None


class PartWriter:
    """Writes one part; nothing vouches for it before :meth:`finish`.

    Args:
        directory: where the parts are.
        number: of this one.
        dtype: of the ids.
    """

    def __init__(self, directory: Path, number: int, dtype: str) -> None:
        self.directory = directory
        self.number = number
        self.dtype = np.dtype(dtype)
        self._file = _path(directory, number, "tokens").open("wb")
        self._rows: list[NDArray[np.int64]] = []
        self._tokens = 0  # of whole documents
        self._max_token_id = self._open_max = -1
        self._open = 0  # tokens of the document that is not whole yet
        self._first: str | None = None
        self._skipped: Skipped = {}

    def write(self, ids: NDArray[Any]) -> None:
        """Append ids, in the part's dtype, of one document or several."""
        assert ids.dtype == self.dtype, ids.dtype
        self._file.write(ids.tobytes())
        self._open += len(ids)
        if len(ids):
            self._open_max = max(self._open_max, int(ids.max()))

    def add_documents(self, lengths: Iterable[tuple[int, int]] | NDArray[np.int64], first: str | None = None) -> None:
        """Say where the documents end that were written since: (tokens, bytes of text) of each."""
        rows = np.asarray(lengths, dtype=np.int64).reshape(-1, 2)
        assert int(rows[:, 0].sum()) == self._open
        if self._first is None:
            self._first = first
        self._rows.append(rows)
        self._tokens += self._open
        self._max_token_id = max(self._max_token_id, self._open_max)
        self._open, self._open_max = 0, -1

    def skip(self, reason: str, name: str) -> None:
        """Leave out what was written since the last whole document."""
        if self._open:
            self._file.seek(self._tokens * self.dtype.itemsize)
            self._file.truncate()
            self._open, self._open_max = 0, -1
        count, names = self._skipped.get(reason, (0, []))
        self._skipped[reason] = (count + 1, names if len(names) >= NAMES_SHOWN else [*names, name])

    def finish(self) -> Part:
        """Make it a part."""
        assert not self._open, "a document without its end"
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        rows = np.concatenate(self._rows) if self._rows else np.empty((0, 2), dtype=np.int64)
        documents = _path(self.directory, self.number, "documents.npy")
        with documents.open("wb") as file:
            np.save(file, rows, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        part = Part(
            directory=self.directory,
            number=self.number,
            dtype=self.dtype.name,
            documents=len(rows),
            tokens=self._tokens,
            max_token_id=self._max_token_id,
            first_document=self._first,
            skipped=self._skipped,
            tokens_sha256=file_sha256(_path(self.directory, self.number, "tokens")),
            documents_sha256=file_sha256(documents),
        )
        state = {name: value for name, value in asdict(part).items() if name not in ("directory", "number")}
        unfinished = _path(self.directory, self.number, "json.tmp")
        unfinished.write_text(json.dumps(state) + "\n", encoding="utf-8")
        unfinished.replace(_path(self.directory, self.number, "json"))
        return part

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):  # of a full disk, say, which was told already
            self._file.close()


def read_part(directory: Path, number: int) -> Part | None:
    """A finished part, None if it is not there.

    Raises:
        UserError: if what vouches for it is damaged.
    """
    path = _path(directory, number, "json")
    if not path.is_file():
        return None
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        skipped = {reason: (int(count), list(names)) for reason, (count, names) in state.pop("skipped").items()}
        return Part(directory=directory, number=number, skipped=skipped, **state)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}): prepare this part again") from error


def together(parts: Iterable[Part]) -> Skipped:
    """What was left out in all parts."""
    total: Skipped = {}
    for part in parts:
        for reason, (count, names) in part.skipped.items():
            before, known = total.get(reason, (0, []))
            total[reason] = (before + count, [*known, *names][:NAMES_SHOWN])
    return total


def _path(directory: Path, number: int, suffix: str) -> Path:
    return directory / f"{number:06}.{suffix}"
