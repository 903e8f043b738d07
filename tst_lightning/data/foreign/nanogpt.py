"""nanoGPT's ``train.bin``: 16-bit ids and nothing else.

The layout is that of nanoGPT's ``data/openwebtext/prepare.py``, which closes every document with the end-of-text
token; its ``data/shakespeare`` holds one document without any. The file has no signature.
"""

from __future__ import annotations

from pathlib import Path

from tst_lightning.data.foreign.stream import Stream, file_size
from tst_lightning.errors import UserError

ITEM_BYTES = 2

# First bytes of files that are something else.
_SIGNATURES = {
    b"MMIDIDX\0": "the index of a Megatron-LM data set: give --from megatron",
    b"\x93NUMPY": "a NumPy file, not raw ids: write it with array.tofile",
    b"PAR1": "a Parquet file: give it to tst-lightning prepare, if it holds text",
    b"\x1f\x8b": "compressed with gzip: unpack it",
    b"\x28\xb5\x2f\xfd": "compressed with zstd: unpack it",
    b"PK\x03\x04": "a zip archive or a PyTorch file: write the ids with array.tofile",
}


def streams(path: Path) -> list[Stream]:
    """What to read of one file.

    Raises:
        UserError: if it cannot be such a file.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder: name the files of nanoGPT or llm.c in it, such as {path / 'train.bin'}")
    size = file_size(path)
    with path.open("rb") as file:
        head = file.read(4096)
    if other := signature(head):
        raise UserError(f"{path} is {other}")
    if not size:
        raise UserError(f"{path} is empty")
    if size % ITEM_BYTES:
        raise UserError(
            f"{path} has {size:,} bytes, which is no whole number of 16-bit ids: it was cut off, or is no "
            "file of nanoGPT"
        )
    return [Stream(str(path), "nanogpt", "<u2", 0, size // ITEM_BYTES, closed=True)]


def signature(head: bytes) -> str | None:
    """What a file that begins with ``head`` is instead, with the way out; None if nothing speaks against raw ids."""
    for magic, name in _SIGNATURES.items():
        if head.startswith(magic):
            return name
    if len(head) >= 128 and max(head[2::4]) <= 1 and not any(head[3::4]):  # no text is like that in 16 bits
        return "of 32-bit ids, not nanoGPT's 16-bit ones: write it with array.astype('uint16').tofile, if they fit"
    printable = set(range(32, 127)) | set(b"\t\n\r")
    if head and all(byte in printable for byte in head):
        return "text, not ids: give it to tst-lightning prepare"
    return None
