"""From tokenised parts to a prepared corpus: the held-out split, the limit, the shuffle, the files and the sidecar."""

from __future__ import annotations

import errno
import hashlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tst_lightning.data.corpus import CHECKSUMS, SPLITS, TOKENIZER, Corpus, file_sha256
from tst_lightning.data.jobs import Reporter
from tst_lightning.data.parts import Part
from tst_lightning.data.shuffle import Shuffler
from tst_lightning.data.split_writer import SplitWriter
from tst_lightning.errors import UserError

if TYPE_CHECKING:
    from tst_lightning.data.tokenise import TextTokenizer

SPARE_BYTES = 2**20  # for indices and logs beside the tokens


@dataclass(frozen=True)
class Choice:
    """What becomes of the documents.

    Attributes:
        held_out: share of them that is held out.
        seed: of what is held out, and of the shuffle.
        shuffle: whether the training documents come in a seeded order instead of the input's.
        max_tokens: take documents from the first on, as long as they have no more tokens together.
        held_out_from: hold out the documents from this one on instead, all of them, beside the limit.
    """

    held_out: float
    seed: int
    shuffle: bool = False
    max_tokens: int | None = None
    held_out_from: int | None = None


def assemble(
    parts: Sequence[Part],
    tokenizer: TextTokenizer,
    prepared: Path,
    scratch: Path,
    choice: Choice,
    *,
    record_tokens: int,
    report: Reporter,
) -> None:
    """Make a corpus of the parts, in their order, whose sidecar is written last.

    Args:
        parts: what was tokenised.
        tokenizer: what tokenised it.
        prepared: an existing directory that holds ``tokenizer.json`` only, on a disk with room for the tokens.
        scratch: an existing directory on the same disk; it takes as much again for a shuffle.
        choice: what becomes of the documents.
        record_tokens: tokens a record.
        report: told of the progress.

    Raises:
        UserError: if there are too few documents for two splits.
        OSError: if the disk has no room.
        RuntimeError: if LitData lost records.
    """
    documents = sum(part.documents for part in parts)
    count = _within_limit(parts, choice)
    if choice.held_out_from is not None:
        held_out = np.arange(choice.held_out_from, documents)
        if not count or not len(held_out):
            raise UserError(_too_few(count + len(held_out), choice))
    elif count < 2:
        raise UserError(_too_few(count, choice))
    else:
        held_out = held_out_documents(count, held_out=choice.held_out, seed=choice.seed)
    total = sum(part.nbytes for part in parts)
    _must_fit(prepared, 2 * total if choice.shuffle else total)

    writers = {name: SplitWriter(prepared / name, tokenizer.dtype, record_tokens) for name in SPLITS}
    takers: dict[str, SplitWriter | Shuffler] = {**writers}
    if choice.shuffle:
        takers["train"] = Shuffler(scratch, tokenizer.dtype)
    report.phase("assembling", total)
    first = 0
    for part in parts:
        lengths = part.lengths()
        numbers = np.arange(first, first + len(lengths))
        is_held_out = np.zeros(len(lengths), dtype=bool)
        low, high = np.searchsorted(held_out, [first, first + len(lengths)])
        is_held_out[held_out[low:high] - first] = True
        chosen = {"train": ~is_held_out & (numbers < count), "val": is_held_out}
        ids, ends = part.ids(), lengths[:, 0].cumsum()
        for name, mask in chosen.items():
            for start, stop in _runs(mask):
                takers[name].add(ids[ends[start] - lengths[start, 0] : ends[stop - 1]], lengths[start:stop])
        report.advance(ids.nbytes, documents=part.documents, tokens=part.tokens)
        first += part.documents
    shuffler = takers["train"]
    if isinstance(shuffler, Shuffler):
        report.phase("shuffling", shuffler.bytes)
        for stretch, rows in shuffler.documents(choice.seed):
            writers["train"].add(stretch, rows)
            report.advance(stretch.nbytes, documents=len(rows), tokens=len(stretch))
    splits = {name: writer.finish() for name, writer in writers.items()}

    names = sorted(path.relative_to(prepared).as_posix() for path in prepared.rglob("*") if path.is_file())
    report.phase("checksums", sum((prepared / name).stat().st_size for name in names))
    sums = ""
    for name in names:
        sums += f"{file_sha256(prepared / name)}  {name}\n"
        report.advance((prepared / name).stat().st_size)
    (prepared / CHECKSUMS).write_text(sums, encoding="utf-8")
    Corpus(
        directory=prepared,
        tokenizer_sha256=file_sha256(prepared / TOKENIZER),
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        end_of_text_id=tokenizer.end_of_text_id,
        max_token_id=max(writer.max_token_id for writer in writers.values()),
        dtype=tokenizer.dtype,
        record_tokens=record_tokens,
        splits=splits,
    ).save()


def held_out_documents(count: int, *, held_out: float, seed: int) -> NDArray[np.int64]:
    """Which of ``count`` documents are held out, about that share: at least one, and never all.

    Whether a document is depends on the seed and its number alone, but for the one that makes it at least one or
    not all.
    """
    assert count >= 2 and 0 < held_out < 1
    chosen = []
    least, least_at, greatest, greatest_at = 1.0, -1, -1.0, -1
    for index in range(count):
        digest = hashlib.sha256(f"{seed}:{index}".encode()).digest()
        draw = int.from_bytes(digest[:8], "big") / 2**64
        if draw < held_out:
            chosen.append(index)
        if draw < least:
            least, least_at = draw, index
        if draw > greatest:
            greatest, greatest_at = draw, index
    if not chosen:
        chosen = [least_at]
    elif len(chosen) == count:
        chosen.remove(greatest_at)
    return np.array(chosen, dtype=np.int64)


def _within_limit(parts: Sequence[Part], choice: Choice) -> int:
    """How many documents there are before the limit; with ``held_out_from``, how many for training."""
    documents = sum(part.documents for part in parts) if choice.held_out_from is None else choice.held_out_from
    if choice.max_tokens is None:
        return documents
    count, left = 0, choice.max_tokens
    for part in parts:
        tokens = part.lengths()[: documents - count, 0].cumsum()
        within = int(np.searchsorted(tokens, left, side="right"))
        count += within
        if within < part.documents:
            break
        left -= part.tokens
    return count


def _too_few(count: int, choice: Choice) -> str:
    if choice.max_tokens is not None:
        return (
            f"--max-tokens {choice.max_tokens} leaves {_documents(count)}, and one is trained on and another held out: "
            "raise it"
        )
    return f"the input holds {_documents(count)}, and one is trained on and another held out: give at least two"


def _documents(count: int) -> str:
    return "one document" if count == 1 else f"{count or 'no'} documents"


def _runs(mask: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """The stretches (start, stop) in which a mask is true."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _must_fit(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < needed + SPARE_BYTES:
        raise OSError(
            errno.ENOSPC,
            f"No space left on device: {needed + SPARE_BYTES:,} bytes are needed to assemble the corpus, "
            f"{free:,} are free",
        )
