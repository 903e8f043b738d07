"""The documents of token streams, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tst_lightning.data.foreign.cut import Cutter, read_blocks
from tst_lightning.data.foreign.stream import Stream
from tst_lightning.errors import UserError


def cut_documents(
    streams: Sequence[Stream], cutter: Cutter, advance: Callable[[int], None], *, cut_at: int | None = None
) -> Iterator[tuple[NDArray[Any], NDArray[np.int64]]]:
    """Cut streams into documents.

    Args:
        streams: in order, the last one closed.
        cutter: what cuts them.
        advance: told of bytes as they are read.
        cut_at: a document ends, besides, after so many tokens of all streams.

    Yields:
        Ids, and a row (tokens with end-of-text, bytes or -1) for each document that they close.
    """
    before = 0  # tokens of what was read
    for stream in streams:
        start = before
        for ids, ends in read_blocks(stream):
            if cut_at is not None and before < cut_at <= before + len(ids):
                ends = np.sort(np.append(ends, cut_at - before))
            yield cutter.cut(ids, ends, stream.path, before - start)
            before += len(ids)
            advance(ids.nbytes)


def single_document(
    streams: Sequence[Stream], cutter: Cutter, advance: Callable[[int], None]
) -> tuple[int, int] | None:
    """Where the only document of the streams begins and ends, in tokens of all streams; None if there are more.

    Reads no farther than to the end of the second document.

    Raises:
        UserError: if there is no document.
    """
    first, last, documents, before = None, 0, 0, 0
    for stream in streams:
        start = before
        for ids, ends in read_blocks(stream):
            text = np.flatnonzero(ids != cutter.end_of_text_id)
            if len(text):
                first = before + int(text[0]) if first is None else first
                last = before + int(text[-1]) + 1
            documents += len(cutter.cut(ids, ends, stream.path, before - start)[1])
            if documents > 1:
                return None
            before += len(ids)
            advance(ids.nbytes)
    if first is None:
        raise UserError(
            f"{', '.join(stream.path for stream in streams[:3])}: nothing but end-of-text tokens: give files with text"
        )
    return first, last


def place_to_cut(single: tuple[int, int], held_out: float, path: str) -> int:
    """Where the end of the only document is held out, in tokens of all streams.

    Raises:
        UserError: if it is too short for two.
    """
    first, last = single
    if last - first < 2:
        raise UserError(f"{path} holds a single token of text, of which none can be held out: give more text")
    return min(max(last - round((last - first) * held_out), first + 1), last - 1)
