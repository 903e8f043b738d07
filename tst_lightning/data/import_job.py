"""The work of ``tst-lightning import``, in a process of its own (see :mod:`tst_lightning.data.jobs`)."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tst_lightning.data.assemble import Choice, assemble
from tst_lightning.data.corpus import TOKENIZER
from tst_lightning.data.foreign.cut import Cutter
from tst_lightning.data.foreign.documents import cut_documents, place_to_cut, single_document
from tst_lightning.data.foreign.stream import Stream
from tst_lightning.data.foreign.text_bytes import byte_lengths
from tst_lightning.data.jobs import Reporter, serve
from tst_lightning.data.parts import Part, PartWriter
from tst_lightning.data.tokenise import load_tokenizer
from tst_lightning.errors import UserError

PART_TOKENS = 1 << 25


@dataclass
class Job:
    """What the process is asked to do.

    Attributes:
        streams: what to read, as plain values of :class:`~tst_lightning.data.foreign.stream.Stream`.
        val: the same of the held-out split; empty to draw it.
        work: an existing directory for all that is not finished.
        tokenizer: the ``tokenizer.json`` that made the tokens.
        end_of_text: the token between documents; None for the tokenizer's own.
        held_out: share of the documents to hold out.
        seed: of what is held out, and of the shuffle.
        shuffle: whether to shuffle the training documents.
        max_tokens: where to stop.
        record_tokens: tokens a record.
    """

    streams: list[dict[str, Any]]
    val: list[dict[str, Any]]
    work: str
    tokenizer: str
    end_of_text: str | None
    held_out: float
    seed: int
    shuffle: bool
    max_tokens: int | None
    record_tokens: int


def main() -> None:
    """Do the job on standard input."""
    serve(Job, import_corpus)


def import_corpus(job: Job, report: Reporter) -> dict[str, Any]:
    """Turn the job's token streams into ``work/prepared``.

    Returns:
        ``empty``: documents left out, ``added``: end-of-text tokens added, and ``cut``: whether the end of a single
        document was held out.

    Raises:
        UserError: naming what the user can mend.
        OSError: if an input cannot be read to its end, or the disk is full.
    """
    work = Path(job.work)
    # not the folder of parts that `prepare` keeps for later: reading tokens again is quick
    prepared, scratch, parts_folder = work / "prepared", work / "scratch", work / "imported"
    for folder in (prepared, scratch, parts_folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    shutil.copyfile(job.tokenizer, prepared / TOKENIZER)
    tokenizer = load_tokenizer(prepared / TOKENIZER, job.end_of_text)
    lengths = byte_lengths(tokenizer.tokenizer, tokenizer.end_of_text_id)
    streams, val = ([Stream(**state) for state in states] for states in (job.streams, job.val))

    def cutter() -> Cutter:
        return Cutter(tokenizer.end_of_text_id, tokenizer.vocab_size, tokenizer.dtype, lengths)

    cut_at = None
    if not val:
        report.phase("looking for documents", _bytes(streams))
        single = single_document(streams, cutter(), report.advance)
        cut_at = None if single is None else place_to_cut(single, job.held_out, streams[0].path)
    report.phase("importing", _bytes([*streams, *val]))
    train_cutter, val_cutter = cutter(), cutter()
    limit = job.max_tokens if cut_at is None else None
    train = _write_parts(streams, train_cutter, parts_folder, 0, report, cut_at=cut_at, limit=limit)
    held_out = _write_parts(val, val_cutter, parts_folder, len(train), report) if val else []
    held_out_from = 1 if cut_at is not None else None
    if val:
        held_out_from = _documents(train)
        for name, parts, of in (("INPUT", train, streams), ("--val", held_out, val)):
            if not _documents(parts):
                raise UserError(f"{name} {of[0].path} holds nothing but end-of-text tokens: give files with text")
    choice = Choice(job.held_out, job.seed, job.shuffle, job.max_tokens, held_out_from)
    assemble([*train, *held_out], tokenizer, prepared, scratch, choice, record_tokens=job.record_tokens, report=report)
    return {
        "empty": train_cutter.empty + val_cutter.empty,
        "added": train_cutter.added + val_cutter.added - (cut_at is not None),
        "cut": cut_at is not None,
    }


def _write_parts(
    streams: Sequence[Stream],
    cutter: Cutter,
    folder: Path,
    number: int,
    report: Reporter,
    *,
    cut_at: int | None = None,
    limit: int | None = None,
) -> list[Part]:
    """Write the documents of the streams as parts, which end with a document; no more are read than ``limit`` takes."""
    parts: list[Part] = []
    tokens = in_part = open_tokens = 0  # of whole documents, also of this part; of the one that is not whole yet
    with ExitStack() as files:
        part = files.enter_context(PartWriter(folder, number, cutter.dtype))
        for ids, rows in cut_documents(streams, cutter, report.advance, cut_at=cut_at):
            if len(rows):
                count = int(rows[:, 0].sum())
                whole, ids = np.split(ids, [count - open_tokens])
                part.write(whole)
                part.add_documents(rows)
                report.advance(documents=len(rows), tokens=count)
                tokens, in_part, open_tokens = tokens + count, in_part + count, 0
                if limit is not None and tokens > limit:
                    break
                if in_part >= PART_TOKENS:
                    parts.append(part.finish())
                    part = files.enter_context(PartWriter(folder, number + len(parts), cutter.dtype))
                    in_part = 0
            part.write(ids)
            open_tokens += len(ids)
        parts.append(part.finish())
    return parts


def _bytes(streams: Sequence[Stream]) -> int:
    return sum(stream.bytes for stream in streams)


def _documents(parts: Sequence[Part]) -> int:
    return sum(part.documents for part in parts)
