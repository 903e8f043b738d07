"""Make one prepared corpus of the shards that several machines have tokenised."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from tst_lightning.data.corpus import RECORD_TOKENS, Corpus
from tst_lightning.data.options import (
    HELD_OUT,
    add_assembly_arguments,
    assembly_faults,
    find_output,
    read_amount,
    work_directory,
)
from tst_lightning.data.prepared import Prepared, reported
from tst_lightning.data.stores import is_url
from tst_lightning.data.supervise import Progress, run_job
from tst_lightning.data.workplace import Workplace, workplace_faults
from tst_lightning.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.epilog = (
        "The corpus is the same, byte for byte, as of one `prepare` of the whole input; it needs two documents."
    )
    parser.add_argument("shards", nargs="+", metavar="DIR", help="made by prepare --shard I/N, all N of them")
    parser.add_argument("--output", required=True, metavar="DIR", help="directory to make, or s3:// or gs:// URL")
    add_assembly_arguments(parser)
    parser.add_argument("--resume", action="store_true", help="go on with an upload that was broken off")
    parser.add_argument("--work", metavar="DIR", help="where unfinished work lies (as for prepare)")


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        The exit status: 0, 1 for a failure, 128 plus the signal when stopped.

    Raises:
        UserError: naming every fault at once.
    """
    return reported(
        lambda: _merge(
            args.shards,
            args.output,
            held_out=args.held_out,
            seed=args.seed,
            shuffle=args.shuffle,
            max_tokens=args.max_tokens,
            resume=args.resume,
            work=args.work,
            record_tokens=RECORD_TOKENS,
            progress=True,
        )
    )


def merge(
    shards: Iterable[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    held_out: float = HELD_OUT,
    seed: int = 0,
    shuffle: bool = False,
    max_tokens: int | str | None = None,
    resume: bool = False,
    work: str | os.PathLike[str] | None = None,
    record_tokens: int = RECORD_TOKENS,
    progress: bool = True,
) -> Corpus:
    """Make one prepared corpus of shards, the same as of one :func:`~tst_lightning.prepare` of the whole input.

    Args:
        shards: directories made by ``tst-lightning prepare --shard I/N``, all of them, in any order.
        output: directory to make, or an ``s3://`` or ``gs://`` URL.
        held_out: share of the documents held out for validation, at least one.
        seed: of which documents are held out, and of the shuffle.
        shuffle: put the training documents into a seeded order.
        max_tokens: take documents from the first on, up to so many tokens together.
        resume: go on with an upload that was broken off.
        work: where unfinished work lies; ``OUTPUT.unfinished`` by default.
        record_tokens: tokens a record on disk.
        progress: show it on standard error.

    Raises:
        UserError: naming every fault at once.
        PrepareError: if the work failed in another way.
    """
    return _merge(
        list(shards),
        output,
        held_out=held_out,
        seed=seed,
        shuffle=shuffle,
        max_tokens=max_tokens,
        resume=resume,
        work=work,
        record_tokens=record_tokens,
        progress=progress,
    ).corpus


def _merge(
    shards: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    held_out: float | None,
    seed: int,
    shuffle: bool,
    max_tokens: int | str | None,
    resume: bool,
    work: str | os.PathLike[str] | None,
    record_tokens: int,
    progress: bool,
) -> Prepared:
    faults = assembly_faults(held_out)
    destination = find_output(output, shards, faults)
    limit = read_amount(max_tokens, faults)
    place = work_directory(destination, work)
    faults += workplace_faults(place, destination, resume=resume)
    remote = [os.fspath(shard) for shard in shards if is_url(shard)]
    faults += [f"{shard} is remote: copy it to this machine and name the copy" for shard in remote]
    directories = [] if remote else [Path(os.path.abspath(shard)) for shard in shards]
    if directories:
        from tst_lightning.data.shards import read_shards

        try:
            read_shards(directories)
        except UserError as error:
            faults += error.faults
    if faults:
        raise UserError(faults)

    from tst_lightning.data.merge_job import Job

    job = Job(
        shards=[str(directory) for directory in directories],
        work=str(place),
        held_out=HELD_OUT if held_out is None else held_out,
        seed=seed,
        shuffle=shuffle,
        max_tokens=limit,
        record_tokens=record_tokens,
    )
    workplace = Workplace(place, destination, vars(job))
    with workplace.open():
        assert workplace.log is not None
        result = workplace.result if workplace.is_finished else run_job(job, workplace.log, Progress(progress))
        workplace.finish(progress=progress, result=result)
    skipped = {reason: (count, names) for reason, (count, names) in result["skipped"].items()}
    return Prepared(Corpus.load(destination), skipped)
