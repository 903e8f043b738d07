"""The bytes of plain and compressed files, in blocks."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO

from tst_lightning.data.pieces import Meter, Piece, UnreadableInput

BLOCK_BYTES = 1 << 16
_ZSTD_FEED = 1 << 10  # 4 compressed bytes can stand for 128 KiB: what one call gives stays below 32 MiB
_ZSTD_WINDOW = 1 << 31  # as `zstd --long=31` writes; zstd takes as much memory as the file asks for

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}


def compression_fault(path: str, compression: str) -> str | None:
    """What is wrong if a file does not begin as its name says.

    Raises:
        OSError: if it cannot be opened.
    """
    with open(path, "rb") as file:
        head = file.read(4)
    skippable = head[1:] == b"\x2a\x4d\x18" and head[0] & 0xF0 == 0x50
    if (
        compression == "none"
        or (compression == "gzip" and head[:2] == b"\x1f\x8b")
        or (compression == "zstd" and (head == b"\x28\xb5\x2f\xfd" or skippable))
    ):
        return None
    what = f"begins with {head!r}" if head else "is an empty file"
    return f"{path} is not {compression}, as its name says (it {what}): fetch it again, rename it or leave it out"


def read_blocks(piece: Piece, meter: Meter, start: int = 0) -> Iterator[bytes]:
    """The uncompressed bytes of a piece's file from ``start`` to the end of the file.

    Args:
        piece: what is read.
        meter: told of the bytes of the file.
        start: where to begin, in a file that is not compressed.

    Raises:
        UnreadableInput: if the file changed its size since the work was planned, or is damaged or cut off.
    """
    with _opened(piece) as file:
        file.seek(start)
        blocks = _READERS[piece.compression](file)
        while block := _next(blocks, piece.path):
            meter.at(file.tell() - piece.start)
            yield block


def unreadable(path: str, error: BaseException) -> UnreadableInput:
    """The error to raise when a file cannot be read to its end."""
    return UnreadableInput(f"{path} cannot be read to its end ({error}): it changed, or is damaged")


def _opened(piece: Piece) -> BinaryIO:
    try:
        file = open(piece.path, "rb")  # noqa: SIM115 the caller closes it
        size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise unreadable(piece.path, error) from error
    by_range = piece.format == "jsonl" and piece.compression == "none"
    if size < piece.stop or (size > piece.stop and not by_range):
        file.close()
        raise unreadable(piece.path, OSError(f"{size:,} bytes now, {piece.stop:,} expected"))
    return file


def _next(blocks: Iterator[bytes], path: str) -> bytes:
    from zstandard import ZstdError

    try:
        return next(blocks, b"")
    except (OSError, EOFError, zlib.error, ZstdError) as error:
        raise unreadable(path, error) from error


def _plain(file: BinaryIO) -> Iterator[bytes]:
    while block := file.read(BLOCK_BYTES):
        yield block


def _gzip(file: BinaryIO) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=file) as members:  # reads one member after the other
        while block := members.read(BLOCK_BYTES):
            yield block


def _zstd(file: BinaryIO) -> Iterator[bytes]:
    from zstandard import ZstdDecompressor

    # zstandard's own stream_reader takes a file that is cut off for a whole one
    decompressor = ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
    frame = decompressor.decompressobj()
    while data := file.read(_ZSTD_FEED):
        while data:
            if frame.eof:
                frame = decompressor.decompressobj()
            if block := frame.decompress(data):
                yield block
            data = frame.unused_data if frame.eof else b""
    if not frame.eof:
        raise EOFError("it ends in the middle of a zstd frame")


_READERS: dict[str, Callable[[BinaryIO], Iterator[bytes]]] = {"none": _plain, "gzip": _gzip, "zstd": _zstd}
