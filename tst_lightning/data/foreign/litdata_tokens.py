"""LitData directories for ``TokensLoader``, as litgpt makes them: a flat stream of ids in chunks.

LitData's own ``TokensLoader`` leaves out what does not fill a last block of each chunk, so the chunks are read as
LitData documents their layout: the number of items, where each begins and the last ends (u32 each), then the ids.
"""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

from tst_lightning.data.foreign.stream import Stream, file_size
from tst_lightning.errors import UserError

_KINDS = ("no_header_tensor", "no_header_numpy")


def streams(path: Path) -> list[Stream]:
    """What to read of one directory: a stream for each chunk.

    Raises:
        UserError: naming all that is wrong with it.
    """
    index_path = path / "index.json"
    if not path.is_dir():
        raise UserError(f"{path} is not a folder: give the LitData directory that holds index.json")
    if not index_path.is_file():
        raise UserError(f"{path} has no index.json: it is no LitData directory, or was not finished")
    try:
        index = json.loads(index_path.read_text(encoding="utf-8"))
        config, chunks = index["config"], index["chunks"]
        kind, _, code = ",".join(config["data_format"]).partition(":")
        compression, encryption = config.get("compression"), config.get("encryption")
        listed = [(str(c["filename"]), int(c["chunk_size"]), c["dim"]) for c in chunks]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index_path} is no index of LitData's ({type(error).__name__}: {error})") from error
    if kind not in _KINDS or any(not isinstance(dim, int) for _, _, dim in listed):
        raise UserError(
            f"{path} does not hold tokens for LitData's TokensLoader but records of "
            f"{', '.join(map(str, config['data_format']))}: write it with item_loader=TokensLoader()"
        )
    if compression or encryption:
        word = f"compressed with {compression}" if compression else "encrypted"
        raise UserError(f"the chunks of {path} are {word}: write it again without")
    dtype = _dtype(kind, code)
    if dtype is None:
        raise UserError(f"{index_path} says that the ids are of format {kind}:{code}, which is no integer")
    faults: list[str] = []
    found: list[Stream] = []
    for filename, items, tokens in listed:
        offset = 4 * (items + 2)
        try:
            _check_chunk(path / filename, items, offset, offset + tokens * int(dtype[2:]))
        except UserError as error:
            faults += error.faults
        if tokens:
            found.append(Stream(str(path / filename), "litdata", dtype, offset, tokens, closed=False))
    if not found:
        faults.append(f"{path} holds no tokens")
    if faults:
        raise UserError(faults)
    return [*found[:-1], replace(found[-1], closed=True)]


def _check_chunk(chunk: Path, items: int, offset: int, expected: int) -> None:
    size = file_size(chunk)
    if size != expected:
        raise UserError(f"{chunk} has {size:,} bytes, not the {expected:,} of the index: it was cut off or damaged")
    with chunk.open("rb") as file:
        head = file.read(offset)
    first, last = struct.unpack("<I", head[4:8])[0], struct.unpack("<I", head[-4:])[0]
    if struct.unpack("<I", head[:4])[0] != items or first != offset or last != expected:
        raise UserError(f"{chunk} does not hold the {items:,} items of the index: it was damaged")


def _dtype(kind: str, code: str) -> str | None:
    """The dtype of LitData's code, None if it is no integer."""
    # LitData keeps these tables to itself; the codes are part of its format.
    tensors = {11: "|u1", 12: "|i1", 13: "<i2", 14: "<i2", 15: "<i4", 16: "<i4", 17: "<i8", 18: "<i8", 20: "<u2"}
    arrays = {0: "|i1", 1: "<i2", 2: "<i4", 3: "<i8", 4: "|u1", 5: "<u2", 6: "<u4", 7: "<u8"}
    return (tensors if kind == "no_header_tensor" else arrays).get(int(code)) if code.isdigit() else None
