"""Token streams of other training stacks into documents, each closed by the end-of-text token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tst_lightning.data.foreign import megatron
from tst_lightning.data.foreign.stream import Stream
from tst_lightning.errors import UserError

BLOCK_TOKENS = 1 << 16  # small enough to stay in the cache: three times as fast as a million


def read_blocks(stream: Stream, block_tokens: int = BLOCK_TOKENS) -> Iterator[tuple[NDArray[Any], NDArray[np.int64]]]:
    """The ids of a stream in order.

    Args:
        stream: what to read.
        block_tokens: tokens a block, at most.

    Yields:
        Ids as they are on disk, and how many of them have gone by wherever a document ends by what the files say
        (not by its tokens), ascending. Documents without a token repeat a place.

    Raises:
        OSError: if the file is shorter than planned.
    """
    dtype = np.dtype(stream.dtype)
    ends = iter(()) if stream.index is None else megatron.document_ends(stream.index)
    waiting = np.empty(0, np.int64)  # ends beyond the blocks so far
    with open(stream.path, "rb") as file:
        file.seek(stream.offset)
        for start in range(0, stream.tokens, block_tokens):
            stop = min(start + block_tokens, stream.tokens)
            ids = np.fromfile(file, dtype, stop - start)
            if len(ids) < stop - start:
                raise OSError(f"{stream.path} has become shorter while it was read: start again")
            while (not len(waiting) or waiting[-1] <= stop) and (more := next(ends, None)) is not None:
                waiting = np.concatenate([waiting, more])
            here = int(np.searchsorted(waiting, stop, side="right"))
            found, waiting = waiting[:here] - start, waiting[here:]
            if stream.closed and stop == stream.tokens and (not here or found[-1] < stop - start):
                found = np.append(found, stop - start)
            yield ids, found


@dataclass
class Cutter:
    """Cuts blocks of ids into documents.

    A document ends with an end-of-text token, or where the files say so; there the token is added. Documents
    without any other token are left out: an end-of-text token in front of the first document, as llm.c writes it,
    is one of them.

    Attributes:
        end_of_text_id: the token.
        vocab_size: ids must be smaller.
        dtype: of the ids on disk.
        lengths: UTF-8 bytes of the text of each id; None if unknown.
        empty: documents left out so far.
        added: end-of-text tokens added so far.
    """

    end_of_text_id: int
    vocab_size: int
    dtype: str
    lengths: NDArray[np.int64] | None
    empty: int = 0
    added: int = 0
    _open: NDArray[np.int64] = field(default_factory=lambda: np.zeros(2, np.int64))

    def cut(
        self, ids: NDArray[Any], ends: NDArray[np.int64], where: str, start: int
    ) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Take the next block.

        Args:
            ids: as they are on disk.
            ends: from :func:`read_blocks`.
            where: the file, for messages.
            start: number of the block's first token in it.

        Returns:
            Ids in the corpus's dtype, and a row (tokens with end-of-text, bytes or -1) for each document that they
            close. The last document may be open.

        Raises:
            UserError: naming the first id outside the vocabulary.
        """
        self._check(ids, where, start)
        is_end = ids == self.end_of_text_id
        places = np.unique(ends[ends > 0])
        self.empty += len(ends) - len(places)
        added = places[~is_end[places - 1]]
        closed = np.union1d(np.flatnonzero(is_end) + 1, added)

        text = ~is_end
        tokens = _between(np.cumsum(text), closed)
        if self.lengths is None:
            sizes = np.zeros(len(closed) + 1, np.int64)
        else:
            sizes = _between(np.cumsum(self.lengths[ids]), closed)  # none for end-of-text
        tokens[0] += self._open[0]
        sizes[0] += self._open[1]
        self._open = np.array([tokens[-1], sizes[-1]])
        empty = tokens[:-1] == 0  # closed by an end-of-text token of its own
        self.empty += int(empty.sum())
        self.added += len(added)

        rows = np.stack([tokens[:-1] + 1, sizes[:-1]], axis=1)[~empty]
        if self.lengths is None:
            rows[:, 1] = -1
        out = ids.astype(self.dtype)
        if len(added):
            out = np.insert(out, added, self.end_of_text_id)
        if empty.any():
            dropped = closed[empty] - 1
            out = np.delete(out, dropped + np.searchsorted(added, dropped, side="right"))
        return out, rows

    def _check(self, ids: NDArray[Any], where: str, start: int) -> None:
        if int(ids.min()) >= 0 and int(ids.max()) < self.vocab_size:
            return
        place = int(((ids < 0) | (ids >= self.vocab_size)).argmax())
        raise UserError(
            f"{where}: token {start + place:,} is {ids[place]}, outside the vocabulary of {self.vocab_size:,}: "
            "give the tokenizer.json that made these tokens, and see that the format is the right one"
        )


def _between(sums: NDArray[Any], closed: NDArray[np.int64]) -> NDArray[np.int64]:
    """Differences of a running sum over the stretches that ``closed`` cuts, the one after the last included."""
    at = np.concatenate([[0], sums[closed - 1], sums[-1:]])
    return np.diff(at).astype(np.int64)
