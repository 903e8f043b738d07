"""Megatron-LM's indexed data sets: ids in ``NAME.bin``, documents in ``NAME.idx``.

The layout is that of Megatron-LM's ``megatron/core/datasets/indexed_dataset.py``, version 1, little-endian: 9 bytes
``MMIDIDX``, version (u64), code of the dtype (u8), number of sequences and of document boundaries (u64 each), then
the sequences' lengths (i32) and byte offsets (i64), the boundaries as numbers of sequences (i64), and for
multimodal sets a mode a sequence (i8).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tst_lightning.data.foreign.stream import Stream, file_size
from tst_lightning.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats
_STEP = 1 << 20  # sequences or documents looked at in one go


@dataclass(frozen=True)
class _Index:
    dtype: str
    sequences: int
    boundaries: int
    lengths: NDArray[Any]
    offsets: NDArray[Any]
    documents: NDArray[Any]


def base(path: Path) -> Path:
    """The path without ``.bin`` or ``.idx``."""
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def is_index(path: Path) -> bool:
    """Whether a file begins as an index does."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def streams(path: Path) -> list[Stream]:
    """What to read of one data set.

    Args:
        path: of the ``.bin`` or the ``.idx`` file, or their path without the ending.

    Raises:
        UserError: naming all that is wrong with the two files.
    """
    data, index_path = Path(f"{base(path)}.bin"), Path(f"{base(path)}.idx")
    faults = [
        f"{file} is missing: a data set of Megatron-LM has both files"
        for file in (data, index_path)
        if not file.is_file()
    ]
    if faults:
        raise UserError(faults)
    size = file_size(data)
    index = _open(index_path)
    tokens = _check(index_path, index)
    expected = tokens * int(index.dtype[2:])
    if size != expected:
        raise UserError(
            f"{data} has {size:,} bytes, not the {expected:,} of the {tokens:,} tokens in {index_path.name}: "
            "it was cut off, or the two files belong to different data sets"
        )
    if not tokens:
        raise UserError(f"{data} holds no tokens")
    return [Stream(str(data), "megatron", index.dtype, 0, tokens, closed=True, index=str(index_path))]


def document_ends(index_path: str) -> Iterator[NDArray[np.int64]]:
    """How many tokens have gone by at the end of each document, in arrays of bounded size."""
    import numpy as np

    index = _open(Path(index_path))
    item_bytes = int(index.dtype[2:])
    for start in range(1, index.boundaries, _STEP):
        last = np.asarray(index.documents[start : start + _STEP]) - 1  # a document's last sequence
        ends = index.offsets[last] // item_bytes + index.lengths[last]
        yield np.where(last < 0, 0, ends).astype(np.int64)  # no sequence yet: empty documents in front


def _open(path: Path) -> _Index:
    import numpy as np

    size = file_size(path)
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
    if not head.startswith(MAGIC):
        raise UserError(f"{path} is no index of Megatron-LM (it does not begin with MMIDIDX)")
    if len(head) < _HEADER.size:
        raise UserError(f"{path} has {size:,} bytes, less than its header: it was cut off")
    _, version, code, sequences, boundaries = _HEADER.unpack(head)
    if version != 1:
        raise UserError(f"{path} is of version {version}: only version 1 can be read")
    if code not in _DTYPES:
        raise UserError(f"{path} says that the ids are of dtype code {code}, which is no integer: it holds no tokens")
    expected = _HEADER.size + sequences * 12 + boundaries * 8
    if size not in (expected, expected + sequences):
        raise UserError(
            f"{path} has {size:,} bytes, not the {expected:,} of {sequences:,} sequences and {boundaries:,} document "
            "boundaries: it was cut off or damaged"
        )
    if not sequences or boundaries < 2:
        raise UserError(
            f"{path} lists {sequences:,} sequences in {max(boundaries - 1, 0):,} documents: there is no text"
        )
    lengths_at = _HEADER.size
    offsets_at = lengths_at + 4 * sequences
    documents_at = offsets_at + 8 * sequences
    return _Index(
        _DTYPES[code],
        sequences,
        boundaries,
        np.memmap(path, "<i4", "r", lengths_at, (sequences,)),
        np.memmap(path, "<i8", "r", offsets_at, (sequences,)),
        np.memmap(path, "<i8", "r", documents_at, (boundaries,)),
    )


def _check(path: Path, index: _Index) -> int:
    """The number of tokens that the index lists.

    Raises:
        UserError: if its sequences do not follow each other, or its documents do not.
    """
    import numpy as np

    item_bytes = int(index.dtype[2:])
    tokens = 0
    for start in range(0, index.sequences, _STEP):
        lengths = np.asarray(index.lengths[start : start + _STEP], np.int64)
        expected = (tokens + np.cumsum(lengths) - lengths) * item_bytes
        wrong = (lengths < 0) | (index.offsets[start : start + _STEP] != expected)
        if wrong.any():
            raise UserError(f"{path}: sequence {start + int(wrong.argmax()):,} does not follow the one before: damaged")
        tokens += int(lengths.sum())
    before = 0
    for start in range(0, index.boundaries, _STEP):
        steps = np.asarray(index.documents[start : start + _STEP])
        if np.diff(steps, prepend=before).min() < 0:
            raise UserError(f"{path}: its document boundaries go backwards: damaged")
        before = int(steps[-1])
    if index.documents[0] != 0 or before != index.sequences:
        raise UserError(
            f"{path}: its documents hold the sequences {int(index.documents[0]):,} to {before:,}, not all of "
            f"{index.sequences:,}: damaged"
        )
    return tokens
