"""The work of ``tst-lightning merge``, in a process of its own (see :mod:`tst_lightning.data.jobs`)."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tst_lightning.data.assemble import Choice, assemble
from tst_lightning.data.corpus import TOKENIZER
from tst_lightning.data.jobs import Reporter, serve
from tst_lightning.data.parts import together
from tst_lightning.data.shards import read_shards
from tst_lightning.data.tokenise import load_tokenizer
from tst_lightning.errors import UserError


@dataclass
class Job:
    """What the process is asked to do.

    Attributes:
        shards: directories.
        work: an existing directory for all that is not finished.
        held_out: share of the documents to hold out.
        seed: of what is held out, and of the shuffle.
        shuffle: whether to shuffle the training documents.
        max_tokens: where to stop.
        record_tokens: tokens a record.
    """

    shards: list[str]
    work: str
    held_out: float
    seed: int
    shuffle: bool
    max_tokens: int | None
    record_tokens: int


def main() -> None:
    """Do the job on standard input."""
    serve(Job, merge_shards)


def merge_shards(job: Job, report: Reporter) -> dict[str, Any]:
    """Assemble ``work/prepared`` of all shards.

    Returns:
        ``skipped`` (see :data:`~tst_lightning.data.parts.Skipped`).

    Raises:
        UserError: naming every damaged part.
        OSError: if the disk is full.
    """
    shards = read_shards([Path(directory) for directory in job.shards])
    parts = sorted((part for shard in shards for part in shard.parts), key=lambda part: part.number)
    report.phase("checking the shards", sum(part.nbytes for part in parts))
    faults = []
    for part in parts:
        if (fault := part.fault()) is not None:
            faults.append(f"{fault}: prepare this shard again")
        report.advance(part.nbytes)
    if faults:
        raise UserError(faults)
    work = Path(job.work)
    prepared, scratch = work / "prepared", work / "scratch"
    for folder in (prepared, scratch):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    shutil.copyfile(shards[0].directory / TOKENIZER, prepared / TOKENIZER)
    tokenizer = load_tokenizer(prepared / TOKENIZER, shards[0].identity["end_of_text"])
    choice = Choice(job.held_out, job.seed, job.shuffle, job.max_tokens)
    assemble(parts, tokenizer, prepared, scratch, choice, record_tokens=job.record_tokens, report=report)
    return {"skipped": together(parts)}
