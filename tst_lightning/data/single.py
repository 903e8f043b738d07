"""A single text document, whose end is held out for want of a second one."""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tst_lightning.data.documents import Piece, plan_pieces, read_piece
from tst_lightning.data.parts import Part, PartWriter
from tst_lightning.data.tokenise import TextTokenizer, encode_pieces
from tst_lightning.errors import UserError


def cut_in_two(piece: Piece, held_out: float, scratch: Path, tokenizer: TextTokenizer) -> Part:
    """A part of two documents: the text up to the line break nearest to where its held-out end begins, and the rest.

    Raises:
        UserError: if there is no line break to cut it at.
    """
    whole, cut = _unpack(piece, held_out, scratch)
    front, end = scratch / "front.txt", scratch / "end.txt"
    with whole.open("rb") as file, end.open("wb") as rest:
        file.seek(cut)
        shutil.copyfileobj(file, rest)
    os.truncate(whole, cut)
    whole.replace(front)
    with PartWriter(scratch, 0, tokenizer.dtype) as part:
        encode_pieces(plan_pieces([str(front), str(end)], format="text"), tokenizer, part, lambda *_: None)
        return part.finish()


def front_of(piece: Piece, held_out: float, scratch: Path) -> Iterator[str]:
    """The text but for the end that will be held out.

    Raises:
        UserError: if there is no line break to cut it at.
    """
    whole, cut = _unpack(piece, held_out, scratch)
    os.truncate(whole, cut)
    for text in read_piece(plan_pieces([str(whole)], format="text")[0], lambda _: None, cuttable=True):
        if isinstance(text, str):
            yield text


def _unpack(piece: Piece, held_out: float, scratch: Path) -> tuple[Path, int]:
    """The text as a plain file, and the byte at which to cut it."""
    whole = scratch / "whole.txt"
    with whole.open("wb") as file:
        for stretch in read_piece(piece, lambda _: None, cuttable=True):
            if isinstance(stretch, str):
                file.write(stretch.encode())
    size = whole.stat().st_size
    target = size - round(size * held_out)
    with whole.open("rb") as unpacked, mmap.mmap(unpacked.fileno(), 0, access=mmap.ACCESS_READ) as text:
        breaks = (text.rfind(b"\n", 0, target) + 1, text.find(b"\n", target) + 1)
    cuts = [cut for cut in breaks if 0 < cut < size]
    if not cuts:
        raise UserError(
            f"{piece.path} is the only document and has no line break at which its end could be held out: "
            "give at least two documents"
        )
    return whole, min(cuts, key=lambda cut: abs(cut - target))
