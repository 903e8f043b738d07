"""What the work of preparing a corpus is cut into, and how a reader says where a document ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

PIECE_BYTES = 16 << 20  # about so much input, where a file can be cut: some seconds of work

EMPTY = "empty"
NOT_TEXT = "not UTF-8 text"
HOLDS_NUL = "holds NUL bytes"
NOT_JSON = "line is not JSON"
NOT_OBJECT = "line is not a JSON object"
NO_FIELD = "field is missing"
NOT_STRING = "field is not a string"
LONE_SURROGATE = "holds a lone surrogate, which UTF-8 cannot write"
TOO_LONG = "line is over 1 GiB"


@dataclass(frozen=True)
class Piece:
    """A stretch of the input with whole documents, the same however many workers or shards there are.

    Attributes:
        path: the file.
        format: "text", "jsonl", "parquet" or "hf" (an Arrow file of a Hugging Face data set).
        compression: "none", "gzip" or "zstd".
        start: the first byte (0 of a compressed file), row group (parquet) or row (hf).
        stop: one past the last; a document belongs to the piece in which it starts.
        bytes: how much input it is, for the progress.
        field: the JSON key or column that holds the text; None for text files.
    """

    path: str
    format: str
    compression: str
    start: int
    stop: int
    bytes: int
    field: str | None


@dataclass(frozen=True)
class End:
    """Closes a document.

    Attributes:
        bytes: UTF-8 bytes of its text, 0 if it is skipped.
        skipped: why what was yielded of it is to be dropped, or None.
        name: where it stands, for messages: a file, or a file with a line, byte or row.
    """

    bytes: int
    skipped: str | None
    name: str


class UnreadableInput(OSError):
    """An input that could be opened before the work began cannot be read to its end."""


class Meter:
    """Tells how much of a piece is read. What it tells adds up to the piece's ``bytes``, however it is read.

    Args:
        piece: the piece.
        advance: told of bytes as they are read.
    """

    def __init__(self, piece: Piece, advance: Callable[[int], None]) -> None:
        self._total = piece.bytes
        self._advance = advance
        self._told = 0

    def at(self, done: int) -> None:
        """``done`` of the piece's bytes are read by now."""
        if (done := min(done, self._total)) > self._told:
            self._advance(done - self._told)
            self._told = done

    def finish(self) -> None:
        """The whole piece is read."""
        self.at(self._total)
