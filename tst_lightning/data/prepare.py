"""Tokenise text into a prepared corpus, all or nothing.

The command checks what it was given, lets a process of its own do the work (``prepare_job``) in a directory for
unfinished work, shows how far it is, and moves the finished corpus into place.
"""

from __future__ import annotations

import argparse
import os
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from tst_lightning.data.corpus import RECORD_TOKENS, Corpus
from tst_lightning.data.documents import EMPTY, FORMATS, find_files
from tst_lightning.data.options import (
    HELD_OUT,
    add_assembly_arguments,
    assembly_faults,
    find_output,
    read_amount,
    work_directory,
)
from tst_lightning.data.prepared import Prepared, reported, skipped_lines
from tst_lightning.data.supervise import Progress, run_job
from tst_lightning.data.workplace import Workplace, workplace_faults
from tst_lightning.errors import TSTWarning, UserError

_BYTES_AND_END_OF_TEXT = 257
_LARGEST_VOCABULARY = 10_000_000  # far above any in use; the trainer aborts on absurd ones


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "A text file (also .gz, .zst) is a document; so is a line of JSON Lines (.jsonl, .ndjson, .json.gz,\n"
        ".json.zst), and a row of Parquet. Folders are read recursively: hidden files and folders are left out,\n"
        "links to files are followed and links to folders are not, and a file reached twice is read once.\n"
        "Documents that are empty or not UTF-8 text are skipped and counted; a file that cannot be read to its\n"
        "end fails the command. Of a single text file, the end is held out. An interrupted call leaves what it\n"
        "has tokenised for --resume, which needs the same inputs and tokenizer; nothing else is ever half-made."
    )
    parser.add_argument("inputs", nargs="*", metavar="INPUT", help="file, or folder of files")
    parser.add_argument(
        "--hf", metavar="NAME_OR_PATH", help="a Hugging Face data set instead of INPUT (needs the extra 'hf')"
    )
    parser.add_argument("--hf-config", metavar="NAME", help="its configuration")
    parser.add_argument("--hf-split", default="train", metavar="SPLIT", help="its split (default: train)")
    parser.add_argument(
        "--format", choices=FORMATS, default="auto", help="of all files (default: auto, which goes by each name)"
    )
    parser.add_argument(
        "--field", default="text", metavar="NAME", help="JSON key or column that holds the text (default: text)"
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="directory to make, or s3:// or gs:// URL")
    parser.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json of a Hugging Face tokenizer")
    parser.add_argument(
        "--train-tokenizer",
        type=int,
        metavar="VOCAB",
        help="train a byte-level BPE tokenizer of exactly VOCAB tokens on the training documents",
    )
    parser.add_argument(
        "--end-of-text",
        metavar="TOKEN",
        help="token of --tokenizer that ends a document (default: the first well-known one it has)",
    )
    parser.add_argument(
        "--pattern",
        action="append",
        default=[],
        metavar="GLOB",
        help="names of the files to read in folders, e.g. '*.txt'; repeatable (default: all)",
    )
    parser.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="GLOB",
        help="files and folders to leave out, by name or by path below the INPUT folder; repeatable",
    )
    add_assembly_arguments(parser)
    parser.add_argument(
        "--shard",
        metavar="I/N",
        help="only tokenise part I (from 0) of N of the input; `merge` makes one corpus of all of them",
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help="processes (default: one for each CPU); the result is the same"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the work of an interrupted call")
    parser.add_argument(
        "--work",
        metavar="DIR",
        help="where unfinished work lies, on a disk with room for the tokens twice, with --shuffle three times "
        "(default: OUTPUT.unfinished, of a URL in the current directory)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        The exit status: 0, 1 for a failure, 128 plus the signal when stopped.

    Raises:
        UserError: naming every fault at once.
    """
    return reported(
        lambda: _prepare(
            args.inputs,
            args.output,
            hf=args.hf,
            hf_config=args.hf_config,
            hf_split=args.hf_split,
            format=args.format,
            field=args.field,
            tokenizer=args.tokenizer,
            train_tokenizer=args.train_tokenizer,
            pattern=args.pattern,
            exclude=args.exclude,
            held_out=args.held_out,
            seed=args.seed,
            shuffle=args.shuffle,
            max_tokens=args.max_tokens,
            end_of_text=args.end_of_text,
            shard=args.shard,
            workers=args.workers,
            resume=args.resume,
            work=args.work,
            record_tokens=RECORD_TOKENS,
            progress=True,
        )
    )


def prepare(
    inputs: Iterable[str | os.PathLike[str]] | str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    hf: str | None = None,
    hf_config: str | None = None,
    hf_split: str = "train",
    format: str = "auto",
    field: str = "text",
    tokenizer: str | os.PathLike[str] | None = None,
    train_tokenizer: int | None = None,
    pattern: Sequence[str] = (),
    exclude: Sequence[str] = (),
    held_out: float = HELD_OUT,
    seed: int = 0,
    shuffle: bool = False,
    max_tokens: int | str | None = None,
    end_of_text: str | None = None,
    workers: int | None = None,
    resume: bool = False,
    work: str | os.PathLike[str] | None = None,
    record_tokens: int = RECORD_TOKENS,
    progress: bool = True,
) -> Corpus:
    """Tokenise text into a prepared corpus, all or nothing. The work is done in processes of its own.

    Args:
        inputs: a file or folder, or several; none with ``hf``. See ``tst-lightning prepare --help`` for the formats.
        output: directory to make, or an ``s3://`` or ``gs://`` URL.
        hf: a Hugging Face data set, by its name on the hub or the folder it was saved to.
        hf_config: its configuration.
        hf_split: its split.
        format: ``text``, ``jsonl`` or ``parquet`` for all files; ``auto`` goes by each name.
        field: the JSON key or column that holds the text.
        tokenizer: a Hugging Face ``tokenizer.json``; either this or ``train_tokenizer``.
        train_tokenizer: train a byte-level BPE tokenizer of exactly so many tokens on the training documents.
        pattern: names of the files to read in folders, as globs; all if empty.
        exclude: files and folders to leave out, as globs on the name or the path below the input folder.
        held_out: share of the documents held out for validation, at least one.
        seed: of which documents are held out, and of the shuffle.
        shuffle: put the training documents into a seeded order.
        max_tokens: take documents from the first on, up to so many tokens together.
        end_of_text: token of ``tokenizer`` that ends a document; by default the first well-known one.
        workers: processes, one for each CPU by default; the result is the same.
        resume: go on with the work of an interrupted call.
        work: where unfinished work lies; ``OUTPUT.unfinished`` by default.
        record_tokens: tokens a record on disk.
        progress: show it on standard error.

    Returns:
        The corpus. What was skipped, other than empty documents, is named in a ``TSTWarning``.

    Raises:
        UserError: naming every fault at once.
        PrepareError: if the work failed in another way.
    """
    prepared = _prepare(
        [inputs] if isinstance(inputs, str | os.PathLike) else list(inputs),
        output,
        hf=hf,
        hf_config=hf_config,
        hf_split=hf_split,
        format=format,
        field=field,
        tokenizer=tokenizer,
        train_tokenizer=train_tokenizer,
        pattern=pattern,
        exclude=exclude,
        held_out=held_out,
        seed=seed,
        shuffle=shuffle,
        max_tokens=max_tokens,
        end_of_text=end_of_text,
        shard=None,
        workers=workers,
        resume=resume,
        work=work,
        record_tokens=record_tokens,
        progress=progress,
    )
    assert isinstance(prepared, Prepared)
    if set(prepared.skipped) - {EMPTY}:
        warnings.warn("\n".join(skipped_lines(prepared.skipped)), TSTWarning, stacklevel=2)
    return prepared.corpus


def _prepare(
    inputs: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    hf: str | None,
    hf_config: str | None,
    hf_split: str,
    format: str,
    field: str,
    tokenizer: str | os.PathLike[str] | None,
    train_tokenizer: int | None,
    pattern: Sequence[str],
    exclude: Sequence[str],
    held_out: float | None,
    seed: int,
    shuffle: bool,
    max_tokens: int | str | None,
    end_of_text: str | None,
    shard: str | None,
    workers: int | None,
    resume: bool,
    work: str | os.PathLike[str] | None,
    record_tokens: int,
    progress: bool,
) -> Prepared | str:
    faults: list[str] = []
    destination = find_output(output, inputs, faults)
    faults += _tokenizer_faults(tokenizer, train_tokenizer, end_of_text)
    limit = read_amount(max_tokens, faults)
    part = _read_shard_option(shard, faults)
    if part is not None:
        theirs = {"--train-tokenizer": train_tokenizer, "--held-out": held_out, "--max-tokens": max_tokens}
        given = [name for name, value in {**theirs, "--shuffle": shuffle or None}.items() if value is not None]
        if given:
            faults.append(
                f"{', '.join(given)} cannot be decided by one shard: give --tokenizer, the same to all, and the "
                "rest to `tst-lightning merge`"
            )
    faults += assembly_faults(held_out)
    if workers is not None and workers < 1:
        faults.append(f"--workers {workers} must be at least 1")
    if record_tokens < 1:
        faults.append(f"record_tokens={record_tokens} must be at least 1")
    if hf is not None and inputs:
        faults.append(f"INPUT {inputs[0]} and --hf {hf} are both given: keep one")
    if hf is None and hf_config is not None:
        faults.append(f"--hf-config {hf_config} belongs to --hf")
    files = [] if hf is not None else _find(inputs, pattern, exclude, faults)
    place = work_directory(destination, work)
    faults += workplace_faults(place, destination, resume=resume)
    faults += _inside_faults(place, inputs) if work is not None else []
    if faults:
        raise UserError(faults)

    from tst_lightning.data.prepare_job import Job

    job = Job(
        files=files,
        dataset=None if hf is None else [hf, hf_config, hf_split],
        format=format,
        field=field,
        work=str(place),
        tokenizer=None if tokenizer is None else os.path.abspath(tokenizer),
        train_tokenizer=train_tokenizer,
        end_of_text=end_of_text,
        held_out=HELD_OUT if held_out is None else held_out,
        seed=seed,
        shuffle=shuffle,
        max_tokens=limit,
        shard=part,
        workers=workers or len(os.sched_getaffinity(0)),
        record_tokens=record_tokens,
    )
    stamps = [
        [status.st_size, status.st_mtime_ns] for status in map(os.stat, [*files, *([tokenizer] if tokenizer else [])])
    ]
    workplace = Workplace(place, destination, {**asdict(job), "workers": None, "stamps": stamps})
    with workplace.open():
        assert workplace.log is not None
        result = workplace.result if workplace.is_finished else run_job(job, workplace.log, Progress(progress))
        workplace.finish(progress=progress, result=result)
    skipped = {reason: (count, names) for reason, (count, names) in result["skipped"].items()}
    if part is not None:
        lines = [f"prepared shard {part[0]} of {part[1]} in {destination}", *skipped_lines(skipped)]
        return "\n  ".join(lines) + "\nnext: tst-lightning merge SHARD... --output DIR, once all are there"
    return Prepared(Corpus.load(destination), skipped, result["cut"])


def _find(
    inputs: Sequence[str | os.PathLike[str]],
    pattern: Sequence[str],
    exclude: Sequence[str],
    faults: list[str],
) -> list[str]:
    """Absolute paths of the files to read; what is wrong is added to ``faults``."""
    paths = [Path(os.path.abspath(path)) for path in inputs]
    wrong = [f"input {path} does not exist: correct the path" for path in paths if not path.exists()]
    wrong += [
        f"input {path} is neither a file nor a folder"
        for path in paths
        if path.exists() and not path.is_file() and not path.is_dir()
    ]
    if not paths:
        wrong.append("no INPUT is given: name files or folders, or a data set by --hf")
    files, closed = find_files(paths, pattern, exclude) if not wrong else ([], [])
    wrong += [f"folder {folder} cannot be read: make it readable, or leave it out (--exclude)" for folder in closed]
    if not files and not wrong:
        chosen = "".join(f" --pattern {glob}" for glob in pattern) + "".join(f" --exclude {g}" for g in exclude)
        filters = f" with{chosen}" if chosen else ""
        wrong.append(f"no file found in {', '.join(map(str, paths))}{filters}: give other inputs")
    faults += wrong
    return files


def _inside_faults(work: Path, inputs: Sequence[str | os.PathLike[str]]) -> list[str]:
    real = Path(os.path.realpath(work))
    return [
        f"--work {work} lies in the input folder {path}: name a directory outside of it"
        for path in inputs
        if os.path.isdir(path) and real.is_relative_to(os.path.realpath(path))
    ]


def _read_shard_option(shard: str | None, faults: list[str]) -> list[int] | None:
    if shard is None:
        return None
    found = re.fullmatch(r"(\d+)/(\d+)", shard)
    if found is None or int(found[1]) >= int(found[2]):
        faults.append(f"--shard {shard} must be I/N with I from 0 to N-1, such as 0/4")
        return None
    return [int(found[1]), int(found[2])]


def _tokenizer_faults(
    tokenizer: str | os.PathLike[str] | None, train_tokenizer: int | None, end_of_text: str | None
) -> list[str]:
    if (tokenizer is None) == (train_tokenizer is None):
        given = "neither is" if tokenizer is None else "both are"
        return [f"give --tokenizer FILE or --train-tokenizer VOCAB, one of them: {given} given"]
    if train_tokenizer is not None:
        faults = []
        if train_tokenizer < _BYTES_AND_END_OF_TEXT:
            faults.append(
                f"--train-tokenizer {train_tokenizer} must be at least {_BYTES_AND_END_OF_TEXT}: "
                "256 bytes and the end-of-text token"
            )
        if train_tokenizer > _LARGEST_VOCABULARY:
            faults.append(f"--train-tokenizer {train_tokenizer} must be at most {_LARGEST_VOCABULARY}")
        if end_of_text is not None:
            faults.append(
                f"--end-of-text {end_of_text} belongs to --tokenizer: "
                "a trained tokenizer ends documents with <|endoftext|>"
            )
        return faults
    assert tokenizer is not None
    from tst_lightning.data.tokenise import load_tokenizer

    try:
        load_tokenizer(Path(tokenizer), end_of_text)
    except UserError as error:
        return list(error.faults)
    return []
