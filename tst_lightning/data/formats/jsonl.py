"""JSON Lines: a line is a JSON object, and one of its fields is a document.

Lines end with a newline; a carriage return before it is white space of JSON's. Blank lines are no documents. A
byte-order mark at the start of the file is passed over. What the escapes of a JSON string spell is the text, NUL
included; null is an empty text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tst_lightning.data.formats.blocks import read_blocks
from tst_lightning.data.formats.plain import cut_text
from tst_lightning.data.pieces import (
    EMPTY,
    LONE_SURROGATE,
    NO_FIELD,
    NOT_JSON,
    NOT_OBJECT,
    NOT_STRING,
    NOT_TEXT,
    PIECE_BYTES,
    TOO_LONG,
    End,
    Meter,
    Piece,
)

LINE_BYTES = 1 << 30
_FIRST_LINE_BYTES = 1 << 24  # a longer first line is not looked at before the work
_BLANK = b" \t\r\n"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_FIELDS_SHOWN = 20

# Numbers are not used, and Python refuses to make an int of thousands of digits
_DECODER = json.JSONDecoder(parse_int=float)


def plan_jsonl(path: str, compression: str, size: int, field: str) -> list[Piece]:
    """Ranges of bytes of a JSON Lines file of ``size`` bytes; one piece if it is compressed."""
    extent = PIECE_BYTES if compression == "none" else max(size, 1)
    starts = range(0, size, extent)
    stops = (min(start + extent, size) for start in starts)
    return [
        Piece(path, "jsonl", compression, start, stop, stop - start, field)
        for start, stop in zip(starts, stops, strict=True)
    ]


def jsonl_fault(piece: Piece) -> str | None:
    """What is wrong with the first line of a file's first piece.

    Raises:
        UnreadableInput: if it cannot be read as far as that.
    """
    assert piece.field is not None and not piece.start
    blocks = read_blocks(piece, Meter(piece, lambda _: None))
    lines = (_without_mark(line, start) for start, line in split_lines(blocks, limit=_FIRST_LINE_BYTES))
    first = next((line for line in lines if line is None or line.strip(_BLANK)), None)
    if first is None:
        return None
    reason, value = _parse(first)
    if reason is not None:
        way_out = "convert it to UTF-8" if reason == NOT_TEXT else "read it as one text with --format text"
        return (
            f"{piece.path} is not JSON Lines (its first line is {reason.removeprefix('line is ')}: {first[:40]!r}): "
            f"{way_out}, or leave it out"
        )
    if piece.field not in value:
        has = ", ".join(map(repr, list(value)[:_FIELDS_SHOWN])) + (", ..." if len(value) > _FIELDS_SHOWN else "")
        return (
            f"{piece.path} has no field {piece.field!r} in its first line (it has {has or 'none'}): "
            "name the field that holds the text with --field, or read the file as one text with --format text"
        )
    if not isinstance(value[piece.field], str | None):
        return (
            f"{piece.path} holds no string in field {piece.field!r} of its first line: "
            "name the field that holds the text with --field"
        )
    return None


def read_jsonl(piece: Piece, advance: Callable[[int], None], *, cuttable: bool) -> Iterator[str | End]:
    """The documents whose lines start in the piece.

    Raises:
        UnreadableInput: if the file changed since the work was planned, or is damaged.
    """
    assert piece.field is not None
    meter = Meter(piece, advance)
    plain = piece.compression == "none"
    start, stop = (piece.start, piece.stop) if plain else (0, None)
    # the byte before the range tells whether a line starts with it
    blocks = read_blocks(piece, meter, max(start - 1, 0))
    for number, (offset, line) in enumerate(split_lines(blocks, start, stop, limit=LINE_BYTES), 1):
        line = _without_mark(line, offset)
        if line is not None and not line.strip(_BLANK):
            continue
        name = f"{piece.path}:byte {offset}" if plain else f"{piece.path}:line {number}"
        reason, text, size = _text(line, piece.field)
        del line  # it may be large
        if reason is None:
            yield from cut_text(text, cuttable=cuttable)
        yield End(size, reason, name)
    meter.finish()


def split_lines(
    blocks: Iterable[bytes], start: int = 0, stop: int | None = None, *, limit: int
) -> Iterator[tuple[int, bytes | None]]:
    """The lines that start at ``start <= i < stop`` of a file.

    Args:
        blocks: its bytes from the one before ``start`` on, from the first one if ``start`` is 0.
        start: the first byte of the range.
        stop: one past its last byte; None for the end of the file.
        limit: of a longer line no more than this is held.

    Yields:
        Where a line starts, and its bytes without the newline; None for one that is over the limit.
    """
    outside = start > 0  # in the line that reaches into the range, if only with its newline
    position = begin = max(start - 1, 0)  # of the block; of the present line
    held: list[bytes] = []
    size = 0  # of the present line so far
    for block in blocks:
        place = 0
        while (end := block.find(b"\n", place)) >= 0:
            if not outside:
                size += end - place
                held.append(block[place:end])
                yield begin, _joined(held) if size <= limit else None
            held.clear()
            outside, size = False, 0
            place = end + 1
            begin = position + place
            if stop is not None and begin >= stop:
                return
        position += len(block)
        if outside:
            if stop is not None and position >= stop:
                return
            continue
        size += len(block) - place
        if size <= limit:
            held.append(block[place:])
        else:
            held.clear()
    if size:
        yield begin, _joined(held) if size <= limit else None


def _joined(held: list[bytes]) -> bytes:
    line = b"".join(held)
    held.clear()  # rather than after the line was used: it may be large
    return line


def _without_mark(line: bytes | None, offset: int) -> bytes | None:
    return line.removeprefix(_BYTE_ORDER_MARK) if line is not None and not offset else line


def _parse(line: bytes) -> tuple[str | None, dict[str, Any]]:
    """Why a line is no JSON object, or None, and the object."""
    try:
        text = line.decode()
    except UnicodeDecodeError:
        return NOT_TEXT, {}
    try:
        value = _DECODER.decode(text)
    except (ValueError, RecursionError):
        return NOT_JSON, {}
    return (None, value) if isinstance(value, dict) else (NOT_OBJECT, {})


def _text(line: bytes | None, field: str) -> tuple[str | None, str, int]:
    """Why a line is skipped, or None, and its text with the size in bytes."""
    if line is None:
        return TOO_LONG, "", 0
    reason, value = _parse(line)
    if reason is not None:
        return reason, "", 0
    if field not in value:
        return NO_FIELD, "", 0
    text = "" if value[field] is None else value[field]
    if not isinstance(text, str):
        return NOT_STRING, "", 0
    try:
        size = len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError:
        return LONE_SURROGATE, "", 0
    return (None if size else EMPTY), text, size
