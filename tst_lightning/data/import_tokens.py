"""Turn token files of nanoGPT, llm.c, Megatron-LM or LitData into a prepared corpus."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

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
from tst_lightning.data.supervise import Progress, run_job
from tst_lightning.data.workplace import Workplace, workplace_faults
from tst_lightning.errors import UserError

if TYPE_CHECKING:
    from tst_lightning.data.foreign.stream import Stream
    from tst_lightning.data.tokenise import TextTokenizer

FORMATS = ("auto", "nanogpt", "llm.c", "megatron", "litdata")


@dataclass(frozen=True)
class Imported:
    """A prepared corpus and what became of the streams that it was made of.

    Attributes:
        corpus: the sidecar.
        format: of the streams.
        empty: documents without text that were left out.
        added: documents that had no end-of-text token, which was added.
        cut: whether the end of a single document was held out, for want of a second one.
    """

    corpus: Corpus
    format: str
    empty: int
    added: int
    cut: bool

    def summary(self) -> str:
        """Lines for the user."""
        *lines, following = Prepared(self.corpus, {}).summary().split("\n")
        if self.empty:
            lines.append(f"  left out {self.empty:,} end-of-text tokens with no document before them")
        if self.empty and self.format == "llm.c":
            lines.append("  (llm.c puts the token in front of each document, here it is at the end: one token on)")
        if self.added:
            lines.append(f"  added end-of-text to {self.added:,} documents that had none")
        if self.cut:
            lines.append("  a single document was given: its end is held out, cut between two tokens")
        lines.append(
            "  ids do not tell which tokenizer made them: see that the samples of "
            f"`tst-lightning inspect {self.corpus.directory}` are text"
        )
        return "\n".join([*lines, following])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "A document ends with the end-of-text token, in Megatron-LM's data sets also where the .idx file says so;\n"
        "there the token is added. An end-of-text token with no text before it is left out, and the last document\n"
        "is closed: a stream of llm.c's, which has the token in front of each document, is the same but one token\n"
        "on. nanoGPT's files carry no signature: a .bin that is no other format's is taken for one."
    )
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="file of nanoGPT or llm.c, .bin or .idx of Megatron-LM, or LitData directory for its TokensLoader",
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="directory to make, or s3:// or gs:// URL")
    parser.add_argument("--tokenizer", required=True, metavar="FILE", help="tokenizer.json that made the tokens")
    parser.add_argument("--from", dest="format", choices=FORMATS, default="auto", help="format (default: auto)")
    parser.add_argument(
        "--val", nargs="+", default=[], metavar="INPUT", help="inputs that are the held-out split, as a whole"
    )
    parser.add_argument(
        "--end-of-text",
        metavar="TOKEN",
        help="token between documents (default: the first well-known one that the tokenizer has)",
    )
    add_assembly_arguments(parser)
    parser.add_argument("--resume", action="store_true", help="go on with an upload that was broken off")
    parser.add_argument("--work", metavar="DIR", help="where unfinished work lies (default: OUTPUT.unfinished)")


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        The exit status: 0, 1 for a failure, 128 plus the signal when stopped.

    Raises:
        UserError: naming every fault at once.
    """
    return reported(
        lambda: _import(
            args.inputs,
            args.output,
            tokenizer=args.tokenizer,
            format=args.format,
            val=args.val,
            held_out=args.held_out,
            seed=args.seed,
            shuffle=args.shuffle,
            max_tokens=args.max_tokens,
            end_of_text=args.end_of_text,
            resume=args.resume,
            work=args.work,
            record_tokens=RECORD_TOKENS,
            progress=True,
        ).summary()
    )


def import_tokens(
    inputs: Iterable[str | os.PathLike[str]] | str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str],
    format: str = "auto",
    val: Iterable[str | os.PathLike[str]] | str | os.PathLike[str] = (),
    held_out: float | None = None,
    seed: int = 0,
    shuffle: bool = False,
    max_tokens: int | str | None = None,
    end_of_text: str | None = None,
    resume: bool = False,
    work: str | os.PathLike[str] | None = None,
    record_tokens: int = RECORD_TOKENS,
    progress: bool = True,
) -> Corpus:
    """Make a prepared corpus of token files of another training stack, all or nothing.

    Args:
        inputs: a file, Megatron-LM data set or LitData directory, or several. See ``tst-lightning import --help``.
        output: directory to make, or an ``s3://`` or ``gs://`` URL.
        tokenizer: the Hugging Face ``tokenizer.json`` that made the tokens.
        format: ``nanogpt``, ``llm.c``, ``megatron`` or ``litdata``; ``auto`` goes by what the files say.
        val: inputs that are the held-out split, as a whole.
        held_out: share of the documents held out for validation, at least one, where ``val`` is empty; 0.01 if None.
        seed: of which documents are held out, and of the shuffle.
        shuffle: put the training documents into a seeded order.
        max_tokens: take documents from the first on, up to so many tokens together; beside ``val``, for training.
        end_of_text: token of the tokenizer between documents; by default the first well-known one.
        resume: go on with an upload that was broken off.
        work: where unfinished work lies; ``OUTPUT.unfinished`` by default.
        record_tokens: tokens a record on disk.
        progress: show it on standard error.

    Raises:
        UserError: naming every fault at once.
        PrepareError: if the work failed in another way.
    """
    return _import(
        _listed(inputs),
        output,
        tokenizer=tokenizer,
        format=format,
        val=_listed(val),
        held_out=held_out,
        seed=seed,
        shuffle=shuffle,
        max_tokens=max_tokens,
        end_of_text=end_of_text,
        resume=resume,
        work=work,
        record_tokens=record_tokens,
        progress=progress,
    ).corpus


def _import(
    inputs: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str],
    format: str,
    val: Sequence[str | os.PathLike[str]],
    held_out: float | None,
    seed: int,
    shuffle: bool,
    max_tokens: int | str | None,
    end_of_text: str | None,
    resume: bool,
    work: str | os.PathLike[str] | None,
    record_tokens: int,
    progress: bool,
) -> Imported:
    faults = assembly_faults(held_out)
    if held_out is not None and val:
        faults.append(f"--held-out {held_out} and --val {val[0]} are both given: --val is held out whole, keep one")
    if record_tokens < 1:
        faults.append(f"record_tokens={record_tokens} must be at least 1")
    if format not in FORMATS:
        faults.append(f"format={format!r} must be one of {', '.join(FORMATS)}")
    destination = find_output(output, [*inputs, *val], faults)
    limit = read_amount(max_tokens, faults)
    place = work_directory(destination, work)
    faults += workplace_faults(place, destination, resume=resume)
    loaded = _load_tokenizer(tokenizer, end_of_text, faults)
    train, held = ([], []) if format not in FORMATS else _plan(_absolute(inputs), _absolute(val), format, faults)
    if loaded is not None:
        faults += [
            f"{stream.path} holds ids of {stream.dtype[2:]} bytes, too small for {tokenizer}, whose vocabulary is "
            f"{loaded.vocab_size:,}: give the tokenizer.json that made the tokens"
            for stream in [*train, *held][:1]
            if loaded.vocab_size > 256 ** int(stream.dtype[2:])
        ]
    if faults:
        raise UserError(faults)
    if progress and format == "auto":
        known = "taken for nanoGPT's 16-bit ids, as no signature says otherwise" if train[0].format == "nanogpt" else ""
        sys.stderr.write(f"{train[0].path}: {known or f'format {train[0].format}'}\n")

    from tst_lightning.data.import_job import Job

    job = Job(
        streams=[asdict(stream) for stream in train],
        val=[asdict(stream) for stream in held],
        work=str(place),
        tokenizer=os.path.abspath(tokenizer),
        end_of_text=end_of_text,
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
    return Imported(Corpus.load(destination), train[0].format, **result)


def _listed(paths: Iterable[str | os.PathLike[str]] | str | os.PathLike[str]) -> list[str | os.PathLike[str]]:
    return [paths] if isinstance(paths, str | os.PathLike) else list(paths)


def _absolute(paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
    return [Path(os.path.abspath(path)) for path in paths]


def _load_tokenizer(path: str | os.PathLike[str], end_of_text: str | None, faults: list[str]) -> TextTokenizer | None:
    from tst_lightning.data.tokenise import load_tokenizer

    try:
        return load_tokenizer(Path(path), end_of_text)
    except UserError as error:
        faults += error.faults
        return None


def _plan(
    inputs: Sequence[Path], val: Sequence[Path], form: str, faults: list[str]
) -> tuple[list[Stream], list[Stream]]:
    """What to read; what is wrong is added to ``faults``."""
    from tst_lightning.data.foreign.plan import plan_streams

    plans: list[list[Stream]] = []
    for paths in (inputs, val):
        try:
            plans.append(plan_streams(paths, form) if paths else [])
        except UserError as error:
            plans.append([])
            faults += error.faults
    seen: dict[str, str] = {}
    for stream in [*plans[0], *plans[1]]:
        real = os.path.realpath(stream.path)
        if real in seen:
            faults.append(f"{stream.path} is given twice: its text would be in the corpus twice")
        seen[real] = stream.path
    formats = sorted({streams[0].format for streams in plans if streams})
    if len(formats) > 1:
        faults.append(f"INPUT and --val are of the formats {' and '.join(formats)}: name the right one with --from")
    return plans[0], plans[1]
