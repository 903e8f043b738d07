"""llm.c's ``.bin``: a header of 256 32-bit integers (magic number, version, number of tokens), then the ids.

The layout is that of llm.c's ``dev/data/data_common.py``. Its scripts put the end-of-text token in front of each
document, and a document may run on into the next file of a set.
"""

from __future__ import annotations

import struct
from pathlib import Path

from tst_lightning.data.foreign.stream import Stream, file_size
from tst_lightning.errors import UserError

HEADER_BYTES = 256 * 4
_DTYPES = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # magic number: version and dtype; GPT-2 and Llama 3
_EVALUATION = 20240522


def magic(path: Path) -> int | None:
    """The magic number of a file of llm.c's, None if it is none."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        head = file.read(4)
    number = int.from_bytes(head, "little")
    return number if number in _DTYPES or number == _EVALUATION else None


def streams(path: Path) -> list[Stream]:
    """What to read of one file.

    Raises:
        UserError: if it is no such file, or its size is not what its header says.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder: name the files of llm.c in it, in order, such as {path}/*_train_*.bin")
    size = file_size(path)
    found = magic(path)
    if found is None:
        raise UserError(f"{path} is no file of llm.c (its magic number is none of {', '.join(map(str, _DTYPES))})")
    if found == _EVALUATION:
        raise UserError(f"{path} holds llm.c's multiple-choice questions, not a text to train on")
    if size < HEADER_BYTES:
        raise UserError(f"{path} has {size:,} bytes, less than llm.c's header: it was cut off")
    with path.open("rb") as file:
        _, version, tokens = struct.unpack("<3i", file.read(12))
    known, dtype = _DTYPES[found]
    if version != known:
        raise UserError(f"{path} is of llm.c's version {version} for magic number {found}: only {known} can be read")
    if not tokens:
        raise UserError(f"{path} holds no tokens")
    expected = HEADER_BYTES + tokens * int(dtype[2:])
    if size != expected:
        raise UserError(
            f"{path} has {size:,} bytes, not the {expected:,} of the {tokens:,} tokens in its header: "
            "it was cut off or damaged"
        )
    return [Stream(str(path), "llm.c", dtype, HEADER_BYTES, tokens, closed=False)]
