"""A run of token ids in a file of another training stack."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tst_lightning.errors import UserError


@dataclass(frozen=True)
class Stream:
    """Where the tokens of one file lie. Plain values, so that it can be sent to another process as JSON.

    Attributes:
        path: the file.
        format: what wrote it.
        dtype: NumPy's name of an id on disk, little-endian.
        offset: bytes before the first token.
        tokens: number of tokens.
        closed: the last document ends with the stream; else it may run on into the next one.
        index: for Megatron-LM, the ``.idx`` file that says where documents end.
    """

    path: str
    format: str
    dtype: str
    offset: int
    tokens: int
    closed: bool
    index: str | None = None

    @property
    def bytes(self) -> int:
        """Bytes of its tokens."""
        return self.tokens * int(self.dtype[2:])


def file_size(path: Path) -> int:
    """The size of a file that can be read.

    Raises:
        UserError: if there is no such file, or it cannot be read.
    """
    if not path.is_file():
        raise UserError(f"{path} is not a file" if path.exists() else f"{path} does not exist")
    try:
        with path.open("rb") as file:
            return file.seek(0, os.SEEK_END)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error
