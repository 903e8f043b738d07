"""The work of ``tst-lightning prepare``, in a process of its own (see :mod:`tst_lightning.data.jobs`).

The input is cut into parts that do not depend on workers or shards. Each part is tokenised, in parallel, and stays
on the disk; the parts are assembled in their order at the end. A resumed job does what is missing.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tst_lightning.data.assemble import Choice, assemble, held_out_documents
from tst_lightning.data.corpus import TOKENIZER, file_sha256
from tst_lightning.data.documents import EMPTY, End, Piece, plan_dataset, plan_pieces, read_piece
from tst_lightning.data.jobs import Reporter, serve
from tst_lightning.data.parts import Part, PartWriter, read_part, together
from tst_lightning.data.pieces import PIECE_BYTES
from tst_lightning.data.pool import in_parallel, use_threads
from tst_lightning.data.shards import PARTS, finish_shard
from tst_lightning.data.single import cut_in_two, front_of
from tst_lightning.data.tokenise import AMBIGUOUS, TextTokenizer, encode_pieces, load_tokenizer, train_tokenizer
from tst_lightning.errors import UserError

PART_BYTES = PIECE_BYTES
PLAN = "plan.json"


@dataclass
class Job:
    """What the process is asked to do.

    Attributes:
        files: input files in order.
        dataset: a Hugging Face data set instead, as ``[name, configuration, split]``.
        format: of the files.
        field: the JSON key or column that holds the text.
        work: an existing directory for all that is not finished.
        tokenizer: a ``tokenizer.json``, or None to train one.
        train_tokenizer: the size of the vocabulary to train.
        end_of_text: the token that closes a document; None for the tokenizer's own.
        held_out: share of the documents to hold out.
        seed: of what is held out, and of the shuffle.
        shuffle: whether to shuffle the training documents.
        max_tokens: where to stop.
        shard: ``[I, N]``: only tokenise part I of N.
        workers: processes.
        record_tokens: tokens a record.
    """

    files: list[str]
    dataset: list[Any] | None
    format: str
    field: str
    work: str
    tokenizer: str | None
    train_tokenizer: int | None
    end_of_text: str | None
    held_out: float
    seed: int
    shuffle: bool
    max_tokens: int | None
    shard: list[int] | None
    workers: int
    record_tokens: int


def main() -> None:
    """Do the job on standard input."""
    serve(Job, prepare_corpus)


def prepare_corpus(job: Job, report: Reporter) -> dict[str, Any]:
    """Turn the job's input into ``work/prepared``: a corpus, or a shard of one.

    Returns:
        ``skipped`` (see :data:`~tst_lightning.data.parts.Skipped`) and ``cut`` (whether the end of a single document
        was held out).

    Raises:
        UserError: naming what the user can mend.
        OSError: if an input cannot be read to its end, or the disk is full.
    """
    use_threads(job.workers)
    work = Path(job.work)
    prepared, scratch, parts_folder = work / "prepared", work / "scratch", work / PARTS
    if (prepared / PARTS).is_dir():  # of a shard that was finished but for its name
        (prepared / PARTS).rename(parts_folder)
    for folder in (prepared, scratch):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    parts_folder.mkdir(exist_ok=True)
    pieces = _plan(job)
    groups = _grouped(pieces)
    _hold_against_plan(job, pieces, groups, work / PLAN)

    tokenizer_path = work / TOKENIZER
    if job.tokenizer is not None:
        shutil.copyfile(job.tokenizer, tokenizer_path)
    elif not tokenizer_path.exists():
        _train(job, groups, tokenizer_path, report)
    tokenizer = load_tokenizer(tokenizer_path, job.end_of_text)

    if job.shard is None:  # LitData takes some seconds to load, most of them while this process waits for others
        threading.Thread(target=importlib.import_module, args=("litdata.streaming",), daemon=True).start()
    numbers = range(len(groups))
    if job.shard is not None:
        index, count = job.shard
        numbers = range(index * len(groups) // count, (index + 1) * len(groups) // count)
    parts = _tokenise(job, groups, numbers, parts_folder, tokenizer_path, tokenizer, report)
    skipped = together(parts)
    shutil.copyfile(tokenizer_path, prepared / TOKENIZER)
    if job.shard is not None:
        finish_shard(prepared, parts, _identity(pieces, tokenizer_path, tokenizer), job.shard, len(groups))
        return {"skipped": skipped, "cut": False}

    choice = Choice(job.held_out, job.seed, job.shuffle, job.max_tokens)
    documents = sum(part.documents for part in parts)
    if not documents:
        raise UserError(_no_document(pieces, skipped, tokenizer))
    single = None
    if documents == 1 and (job.max_tokens is None or sum(part.tokens for part in parts) <= job.max_tokens):
        single = _text_file(pieces, next(part.first_document for part in parts if part.documents))
    if single is not None:
        parts = [cut_in_two(single, job.held_out, scratch, tokenizer)]
        choice = Choice(job.held_out, job.seed, held_out_from=1)
    assemble(parts, tokenizer, prepared, scratch, choice, record_tokens=job.record_tokens, report=report)
    return {"skipped": skipped, "cut": single is not None}


# ------------------------------------------------------------------------------ what there is to do


def _plan(job: Job) -> list[Piece]:
    if job.dataset is not None:
        name, configuration, split = job.dataset
        return plan_dataset(name, config=configuration, split=split, field=job.field)
    return plan_pieces(job.files, format=job.format, field=job.field)


def _grouped(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Pieces in parts of about ``PART_BYTES``."""
    groups: list[list[Piece]] = []
    size = PART_BYTES
    for piece in pieces:
        if size >= PART_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(piece)
        size += piece.bytes
    return groups


def _identity(pieces: Sequence[Piece], path: Path, tokenizer: TextTokenizer) -> dict[str, Any]:
    """What must be the same in all shards: wherever the files lie on each machine."""
    listed = [[os.path.basename(p.path), p.format, p.start, p.stop, p.bytes, p.field] for p in pieces]
    return {
        "inputs_sha256": hashlib.sha256(json.dumps(listed).encode()).hexdigest(),
        "tokenizer_sha256": file_sha256(path),
        "end_of_text": tokenizer.end_of_text,
    }


def _hold_against_plan(job: Job, pieces: Sequence[Piece], groups: Sequence[Sequence[Piece]], path: Path) -> None:
    """See that a resumed job is the one that was begun; keep the plan of a new one.

    Raises:
        UserError: with every difference.
    """
    options: dict[str, Any] = {
        "--hf, --hf-config, --hf-split": job.dataset,
        "--format": job.format,
        "--field": job.field,
        "--tokenizer (hash)": None if job.tokenizer is None else file_sha256(Path(job.tokenizer))[:16],
        "--train-tokenizer": job.train_tokenizer,
        "--end-of-text": job.end_of_text,
        "--shard": None if job.shard is None else "{}/{}".format(*job.shard),
    }
    if job.train_tokenizer is not None:  # which learns from what is not held out
        options |= {"--held-out": job.held_out, "--seed": job.seed}
    inputs = {}
    for piece in pieces:
        status = os.stat(piece.path)
        inputs[piece.path] = [status.st_size, status.st_mtime_ns]
    plan = {"options": options, "inputs": inputs, "parts": len(groups)}
    if not path.exists():
        unfinished = path.with_name(f"{path.name}.tmp")
        unfinished.write_text(json.dumps(plan), encoding="utf-8")
        unfinished.replace(path)
        return
    try:
        begun = json.loads(path.read_text(encoding="utf-8"))
        faults = [
            f"{name} was {_given(value)}, and is {_given(options.get(name))} now"
            for name, value in begun["options"].items()
            if value != options.get(name)
        ]
        was = begun["inputs"]
        files = {
            "changed since": [name for name in was if name in inputs and inputs[name] != was[name]],
            "not among the inputs now": [name for name in was if name not in inputs],
            "not among the inputs then": [name for name in inputs if name not in was],
        }
        faults += [f"{_first_of(names)}: {what}" for what, names in files.items() if names]
        if not faults and list(was) != list(inputs):
            faults.append("the inputs come in another order now")
        if not faults and begun["parts"] != len(groups):
            faults.append("another release cut the input into other parts")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(
            f"--resume: {path} is damaged ({type(error).__name__}: {error}): delete {path.parent} to begin anew"
        ) from error
    if faults:
        raise UserError(
            f"--resume: {fault}: give what was given then, or delete {path.parent} to begin anew" for fault in faults
        )


def _given(value: object) -> object:
    return "not given" if value is None else value


def _first_of(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1:,} more" if len(names) > 1 else "")


def _no_document(pieces: Sequence[Piece], skipped: dict[str, Any], tokenizer: TextTokenizer) -> str:
    files = len({piece.path for piece in pieces})
    reasons = ", ".join(
        f"{count:,} {reason} ({names[0]}{', ...' if count > 1 else ''})" for reason, (count, names) in skipped.items()
    )
    if set(skipped) == {AMBIGUOUS}:
        return (
            f"every document holds {tokenizer.end_of_text!r}, which this tokenizer cannot tell from its end-of-text "
            "token: name another one with --end-of-text"
        )
    way_out = "give files with text" if set(skipped) <= {EMPTY} else "give readable UTF-8 text"
    return f"there is no document in the input ({files:,} files){': ' if reasons else ''}{reasons}: {way_out}"


# ------------------------------------------------------------------------------ tokenising


def _tokenise(
    job: Job,
    groups: Sequence[Sequence[Piece]],
    numbers: Sequence[int],
    folder: Path,
    tokenizer_path: Path,
    tokenizer: TextTokenizer,
    report: Reporter,
) -> list[Part]:
    """The parts of those numbers, as far as ``max_tokens`` asks for them."""
    found = {number: _read_whole(folder, number) for number in numbers}
    missing = [number for number in numbers if found[number] is None]
    report.phase("tokenising", sum(piece.bytes for number in missing for piece in groups[number]))
    tasks = [(groups[number], folder, number, str(tokenizer_path), job.end_of_text) for number in missing]
    made = in_parallel(_tokenise_part, tasks, job.workers, report)
    parts: list[Part] = []
    tokens = 0
    for number in numbers:
        if job.max_tokens is not None and tokens > job.max_tokens:
            break
        part = found[number]
        parts.append(next(made) if part is None else part)
        tokens += parts[-1].tokens
    made.close()  # ends what runs ahead
    return parts


def _read_whole(folder: Path, number: int) -> Part | None:
    """A part that an interrupted call has finished; a machine that went down may have lost some of it."""
    try:
        part = read_part(folder, number)
    except UserError:
        return None
    return part if part is not None and part.fault() is None else None


_loaded: dict[tuple[str, str | None], TextTokenizer] = {}


def _tokenise_part(
    pieces: Sequence[Piece],
    folder: Path,
    number: int,
    tokenizer_path: str,
    end_of_text: str | None,
    advance: Callable[[int, int, int], None],
) -> Part:
    key = (tokenizer_path, end_of_text)
    if key not in _loaded:
        _loaded[key] = load_tokenizer(Path(tokenizer_path), end_of_text)
    tokenizer = _loaded[key]
    with PartWriter(folder, number, tokenizer.dtype) as part:
        encode_pieces(pieces, tokenizer, part, advance)
        return part.finish()


def _text_file(pieces: Sequence[Piece], name: str | None) -> Piece | None:
    """The text file of that name, if it is one."""
    return next((piece for piece in pieces if piece.format == "text" and piece.path == name), None)


# ------------------------------------------------------------------------------ training a tokenizer


def _train(job: Job, groups: Sequence[Sequence[Piece]], path: Path, report: Reporter) -> None:
    """Train a tokenizer on the documents that will not be held out."""
    assert job.train_tokenizer is not None
    total = sum(piece.bytes for pieces in groups for piece in pieces)
    report.phase("counting the documents", total)
    counted = list(in_parallel(_count, [(pieces,) for pieces in groups], job.workers, report))
    documents = sum(count for count, _, _ in counted)
    skipped = {name for _, _, names in counted for name in names}
    pieces = [piece for group in groups for piece in group if piece.path not in skipped]
    held_out: set[int] = set()
    single = None
    if documents > 1:
        held_out = set(held_out_documents(documents, held_out=job.held_out, seed=job.seed).tolist())
    elif documents == 1:
        single = _text_file(pieces, next(name for count, name, _ in counted if count))
    report.phase("training the tokenizer", total)
    if single is not None:
        texts: Iterable[str] = front_of(single, job.held_out, Path(job.work, "scratch"))
    else:
        texts = _texts(pieces, held_out, report)
    train_tokenizer(texts, job.train_tokenizer, path)


def _count(pieces: Sequence[Piece], advance: Callable[[int, int, int], None]) -> tuple[int, str | None, list[str]]:
    """How many documents there are, the name of the first one, and which text files are none."""
    count, first = 0, None
    skipped = []
    for piece in pieces:
        before = count
        for text in read_piece(piece, lambda size: advance(size, 0, 0), cuttable=True):
            if isinstance(text, End):
                if text.skipped is None:
                    count += 1
                    first = first or text.name
                elif piece.format == "text":
                    skipped.append(piece.path)
        advance(0, count - before, 0)
    return count, first, skipped


def _texts(pieces: Sequence[Piece], held_out: set[int], report: Reporter) -> Iterator[str]:
    """The text of the training documents, in stretches."""
    number = 0
    for piece in pieces:
        for text in read_piece(piece, report.advance, cuttable=True):
            if isinstance(text, str):
                if number not in held_out:
                    yield text
            elif text.skipped is None:
                number += 1
