"""Tokenise text files into a prepared corpus, all or nothing.

The command checks what it was given, lets a process of its own do the work (``prepare_job``) in a temporary
directory beside the output, shows how far it is, and moves the finished corpus into place.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import sys
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tst_lightning.data.corpus import RECORD_TOKENS, Corpus
from tst_lightning.data.documents import EMPTY, UNREADABLE, find_files
from tst_lightning.data.prepare_job import Job
from tst_lightning.data.supervise import PrepareError, Progress, Stopped, run_job, stoppable
from tst_lightning.errors import TSTWarning, UserError

_BYTES_AND_END_OF_TEXT = 257
_LARGEST_VOCABULARY = 10_000_000  # far above any in use; the trainer aborts on absurd ones


@dataclass(frozen=True)
class Prepared:
    """A prepared corpus and what became of its input.

    Attributes:
        corpus: the sidecar.
        skipped: why files were left out, and which.
        cut: whether the end of a single document was held out, for want of a second one.
    """

    corpus: Corpus
    skipped: dict[str, list[str]]
    cut: bool

    def summary(self) -> str:
        """Lines for the user."""
        corpus = self.corpus
        total = sum(split.bytes for split in corpus.splits.values())
        lines = [f"prepared {corpus.directory}"]
        for name, split in corpus.splits.items():
            lines.append(
                f"  {name:<5} {split.documents:>11,} documents {split.tokens:>15,} tokens "
                f"{split.bytes:>16,} bytes ({split.bytes / total:.1%}), "
                f"{split.bytes / split.tokens:.2f} bytes a token"
            )
        lines.append(
            f"  vocabulary of {corpus.vocab_size:,} ({corpus.dtype}); every document ends with "
            f"{corpus.end_of_text} (id {corpus.end_of_text_id})"
        )
        if self.cut:
            lines.append("  a single document was given: its end is held out, cut at a line break")
        lines += [f"  {line}" for line in self.skipped_lines()]
        lines.append(
            f"next: tst-lightning fit --config RECIPE.yaml --data.path {corpus.directory} "
            f"--model.network.init_args.config.vocab_size {corpus.vocab_size}"
        )
        return "\n".join(lines)

    def skipped_lines(self) -> list[str]:
        """One line for each reason, with the first few names."""
        lines = []
        for reason, paths in self.skipped.items():
            names = ", ".join(os.fsencode(path).decode(errors="replace") for path in paths[:3])
            more = ", ..." if len(paths) > 3 else ""
            lines.append(f"skipped {len(paths):,} ({reason}): {names}{more}")
        return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "A file is a document. Folders are read recursively: hidden files and folders are left out, links\n"
        "to files are followed and links to folders are not, and a file reached twice is read once. Files\n"
        "that are not UTF-8 text (or hold NUL characters), unreadable or empty are skipped and counted."
    )
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="text file or folder of text files")
    parser.add_argument("--output", required=True, metavar="DIR", help="directory to make")
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
    parser.add_argument(
        "--held-out",
        type=float,
        default=0.01,
        metavar="FRACTION",
        help="share of the documents to hold out for validation, at least one (default: 0.01); "
        "of a single document, the share of its end",
    )
    parser.add_argument("--seed", type=int, default=0, help="of which documents are held out (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        The exit status: 0, 1 for a failure, 128 plus the signal when stopped.

    Raises:
        UserError: naming every fault at once.
    """
    try:
        prepared = _prepare(
            args.inputs,
            args.output,
            tokenizer=args.tokenizer,
            train_tokenizer=args.train_tokenizer,
            pattern=args.pattern,
            exclude=args.exclude,
            held_out=args.held_out,
            seed=args.seed,
            end_of_text=args.end_of_text,
            record_tokens=RECORD_TOKENS,
            progress=True,
        )
    except PrepareError as error:
        if error.log:
            sys.stderr.write(error.log.rstrip() + "\n")
        sys.stderr.write(f"error: {error}\n")
        return 1
    except Stopped as stop:
        sys.stderr.write(f"stopped: nothing was left of {args.output}\n")
        return 128 + stop.signal
    sys.stdout.write(prepared.summary() + "\n")
    return 0


def prepare(
    inputs: Iterable[str | os.PathLike[str]] | str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    train_tokenizer: int | None = None,
    pattern: Sequence[str] = (),
    exclude: Sequence[str] = (),
    held_out: float = 0.01,
    seed: int = 0,
    end_of_text: str | None = None,
    record_tokens: int = RECORD_TOKENS,
    progress: bool = True,
) -> Corpus:
    """Tokenise text files into a prepared corpus, all or nothing. The work is done in a process of its own.

    Args:
        inputs: a text file or folder, or several. A file is a document.
        output: directory to make.
        tokenizer: a Hugging Face ``tokenizer.json``; either this or ``train_tokenizer``.
        train_tokenizer: train a byte-level BPE tokenizer of exactly so many tokens on the training documents.
        pattern: names of the files to read in folders, as globs; all if empty.
        exclude: files and folders to leave out, as globs on the name or the path below the input folder.
        held_out: share of the documents held out for validation, at least one.
        seed: of which documents are held out.
        end_of_text: token of ``tokenizer`` that ends a document; by default the first well-known one.
        record_tokens: tokens a record on disk.
        progress: show it on standard error.

    Returns:
        The corpus. Files that were skipped, other than empty ones, are named in a ``TSTWarning``.

    Raises:
        UserError: naming every fault at once.
        PrepareError: if the work failed in another way.
    """
    prepared = _prepare(
        [inputs] if isinstance(inputs, str | os.PathLike) else list(inputs),
        output,
        tokenizer=tokenizer,
        train_tokenizer=train_tokenizer,
        pattern=pattern,
        exclude=exclude,
        held_out=held_out,
        seed=seed,
        end_of_text=end_of_text,
        record_tokens=record_tokens,
        progress=progress,
    )
    if set(prepared.skipped) - {EMPTY}:
        warnings.warn("\n".join(prepared.skipped_lines()), TSTWarning, stacklevel=2)
    return prepared.corpus


def _prepare(
    inputs: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None,
    train_tokenizer: int | None,
    pattern: Sequence[str],
    exclude: Sequence[str],
    held_out: float,
    seed: int,
    end_of_text: str | None,
    record_tokens: int,
    progress: bool,
) -> Prepared:
    destination = Path(os.path.abspath(output))
    faults = _output_faults(os.fspath(output), destination, inputs)
    faults += _tokenizer_faults(tokenizer, train_tokenizer, end_of_text)
    if not 0 < held_out < 1:  # also true for nan
        faults.append(f"--held-out {held_out} must lie between 0 and 1: 0.01 holds out one document in a hundred")
    if record_tokens < 1:
        faults.append(f"record_tokens={record_tokens} must be at least 1")
    files, closed = _find(inputs, pattern, exclude, faults)
    if faults:
        raise UserError(faults)

    # The corpus is a folder inside, so that what a killed process leaves never loads under this name.
    workplace = destination.with_name(f"{destination.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    prepared, scratch = workplace / "prepared", workplace / "scratch"
    job = Job(
        files=files,
        bytes=sum(os.path.getsize(file) for file in files if os.path.exists(file)),
        prepared=str(prepared),
        scratch=str(scratch),
        tokenizer=None if tokenizer is None else os.path.abspath(tokenizer),
        train_tokenizer=train_tokenizer,
        end_of_text=end_of_text,
        held_out=held_out,
        seed=seed,
        record_tokens=record_tokens,
    )
    new_parents = [parent for parent in destination.parents if not parent.exists()]
    finished = False
    with stoppable():
        try:
            prepared.mkdir(parents=True)
            scratch.mkdir()
            result = run_job(job, workplace / "log", Progress(progress))
            os.replace(prepared, destination)
            finished = True
        except OSError as error:
            raise PrepareError(f"{output} could not be written ({error})") from error
        finally:
            shutil.rmtree(workplace, ignore_errors=True)
            for parent in new_parents if not finished else ():
                with suppress(OSError):
                    parent.rmdir()
    skipped: dict[str, list[str]] = result["skipped"]
    if closed:
        skipped.setdefault(UNREADABLE, []).extend(closed)
    return Prepared(Corpus.load(destination), skipped, result["cut"])


def _find(
    inputs: Sequence[str | os.PathLike[str]],
    pattern: Sequence[str],
    exclude: Sequence[str],
    faults: list[str],
) -> tuple[list[str], list[str]]:
    """Absolute paths of the files to read and of folders that cannot be; what is wrong is added to ``faults``."""
    paths = [Path(os.path.abspath(path)) for path in inputs]
    wrong = [f"input {path} does not exist" for path in paths if not path.exists()]
    wrong += [
        f"input {path} is neither a file nor a folder"
        for path in paths
        if path.exists() and not path.is_file() and not path.is_dir()
    ]
    files, closed = find_files(paths, pattern, exclude) if not wrong else ([], [])
    if not files and not wrong:
        chosen = "".join(f" --pattern {glob}" for glob in pattern) + "".join(f" --exclude {g}" for g in exclude)
        filters = f" with{chosen}" if chosen else ""
        unreadable = f" (not readable: {', '.join(closed)})" if closed else ""
        wrong.append(
            f"no file found in {', '.join(map(str, paths)) or 'no input'}{filters}{unreadable}: give other inputs"
        )
    faults += wrong
    return files, closed


def _output_faults(given: str, destination: Path, inputs: Sequence[str | os.PathLike[str]]) -> list[str]:
    faults = []
    if "://" in given or "{%" in given:  # litdata would write to a bucket, or put the date in
        faults.append(f"--output {given} must be a plain local directory: copy it elsewhere afterwards")
    elif os.path.lexists(destination):
        faults.append(f"--output {given} exists already: name another directory, or delete it")
    real = os.path.realpath(destination)
    for path in inputs:
        folder = os.path.realpath(path)
        if os.path.isdir(folder) and Path(real).is_relative_to(folder):
            faults.append(f"--output {given} lies in the input folder {path}: name a directory outside of it")
    return faults


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
