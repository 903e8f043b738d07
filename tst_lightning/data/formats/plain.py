"""Text files: a file is a document.

Text is decoded strictly as UTF-8 and never changed: newlines, byte-order marks and control characters stay as
they are. Only NUL bytes are taken as a sign that a file is no text.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator

from tst_lightning.data.formats.blocks import BLOCK_BYTES, read_blocks
from tst_lightning.data.pieces import EMPTY, HOLDS_NUL, NOT_TEXT, End, Meter, Piece


def plan_text(path: str, compression: str, size: int) -> list[Piece]:
    """The one piece of a text file of ``size`` bytes."""
    return [Piece(path, "text", compression, 0, size, size, None)]


def read_text(piece: Piece, advance: Callable[[int], None], *, cuttable: bool) -> Iterator[str | End]:
    """The text of a file, in stretches that may be encoded one by one if ``cuttable``, else in one.

    Raises:
        UnreadableInput: if the file changed since the work was planned, or is damaged.
    """
    meter = Meter(piece, advance)
    cutter = Cutter(cuttable)
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    size = 0
    skipped = None
    try:
        for block in read_blocks(piece, meter):
            if b"\0" in block:
                skipped = HOLDS_NUL
                break
            size += len(block)
            if text := cutter.add(decoder.decode(block)):
                yield text
        else:
            decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        skipped = NOT_TEXT
    meter.finish()
    if skipped is None and (text := cutter.rest()):
        yield text
    skipped = skipped or (None if size else EMPTY)
    yield End(0 if skipped else size, skipped, piece.path)


def cut_text(text: str, *, cuttable: bool) -> Iterator[str]:
    """A text that is in memory already, in such stretches."""
    if len(text) <= BLOCK_BYTES or not cuttable:
        yield text
        return
    cutter = Cutter(cuttable)
    for start in range(0, len(text), BLOCK_BYTES):
        if stretch := cutter.add(text[start : start + BLOCK_BYTES]):
            yield stretch
    if stretch := cutter.rest():
        yield stretch


class Cutter:
    """Cuts a text where a cut cannot change its tokens: between an ASCII letter or digit and a newline.

    Args:
        cuttable: whether the tokenizer allows it (``TextTokenizer.cuttable``); if not, all is kept for the end.
    """

    def __init__(self, cuttable: bool) -> None:
        self._cuttable = cuttable
        self._pending: list[str] = []
        self._last = ""  # the character before the block

    def add(self, block: str) -> str:
        """Take more of the text and give what can be encoded by now, perhaps nothing."""
        if not block:
            return ""
        cut = _last_cut(self._last, block) if self._cuttable else None
        self._last = block[-1]
        if cut is None:
            self._pending.append(block)
            return ""
        stretch = "".join((*self._pending, block[:cut]))
        self._pending = [block[cut:]]
        return stretch

    def rest(self) -> str:
        """What is left of the text at its end."""
        rest = "".join(self._pending)
        self._pending = []
        return rest


def _last_cut(last: str, block: str) -> int | None:
    end = len(block)
    while (place := block.rfind("\n", 0, end)) >= 0:
        before = block[place - 1] if place else last
        if before.isascii() and before.isalnum():
            return place
        end = place
    return None
