"""The work of ``tst-lightning prepare``, in a process of its own.

``litdata.optimize`` changes the process that calls it (start method, random seeds, signal handlers) and
returns normally when its worker was killed; tokenizers cannot be interrupted. So the command only watches
this process: it reads one job from standard input, reports events as JSON lines on standard output, and
whatever a library prints goes to standard error. It ends when standard input does: its parent is gone then.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tst_lightning.data.corpus import TOKENIZER, Corpus, Split, file_sha256, split_faults
from tst_lightning.data.documents import EMPTY, Document, check_file, split_documents
from tst_lightning.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tst_lightning.data.tokenise import TextTokenizer

AMBIGUOUS = "text holds the end-of-text token"
CHUNK_BYTES = 64_000_000
SPARE_BYTES = 2**20  # for indices and logs beside the tokens


@dataclass
class Job:
    """What the process is asked to do.

    Attributes:
        files: text files in order.
        bytes: their size in all, for the progress.
        prepared: an existing, empty directory that becomes the prepared corpus.
        scratch: an existing directory for temporary files.
        tokenizer: a ``tokenizer.json``, or None to train one.
        train_tokenizer: the size of the vocabulary to train.
        end_of_text: the token that closes a document; None for the tokenizer's own.
        held_out: share of the documents to hold out.
        seed: of what is held out.
        record_tokens: tokens a record.
    """

    files: list[str]
    bytes: int
    prepared: str
    scratch: str
    tokenizer: str | None
    train_tokenizer: int | None
    end_of_text: str | None
    held_out: float
    seed: int
    record_tokens: int


@dataclass
class Reporter:
    """Writes events for the parent: phases, progress ten times a second, the result or the faults."""

    stream: IO[str]
    done: int = 0
    documents: int = 0
    tokens: int = 0
    _last: float = field(default=0.0)

    def event(self, **values: Any) -> None:
        """Write one event."""
        self.stream.write(json.dumps(values) + "\n")
        self.stream.flush()

    def phase(self, name: str, total: int) -> None:
        """Begin a phase of ``total`` bytes of text."""
        self.done = self.documents = self.tokens = 0
        self.event(event="phase", name=name, total=total)

    def advance(self, size: int = 0, *, documents: int = 0, tokens: int = 0) -> None:
        """Count progress."""
        self.done += size
        self.documents += documents
        self.tokens += tokens
        if time.monotonic() - self._last >= 0.1:
            self._last = time.monotonic()
            self.event(event="progress", done=self.done, documents=self.documents, tokens=self.tokens)


def main() -> None:
    """Do the job on standard input and exit: 0 with a result, 1 with faults."""
    job = Job(**json.loads(sys.stdin.buffer.readline()))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    report = Reporter(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)
    # a forked worker must not hold the parent's pipe open after this process was killed
    os.register_at_fork(after_in_child=lambda: os.close(report.stream.fileno()))
    try:
        report.event(event="result", **prepare_corpus(job, report))
    except UserError as error:
        report.event(event="faults", faults=error.faults)
        sys.exit(1)
    except OSError as error:  # a full disk, above all: no traceback helps there
        report.event(event="failed", message=str(error))
        sys.exit(1)


def _end_with_parent() -> None:
    # Not sys.stdin.read(): a thread that waits in it holds its lock, on which every forked worker would hang.
    while os.read(0, 1024):
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)


def prepare_corpus(job: Job, report: Reporter) -> dict[str, Any]:
    """Turn the job's files into a prepared corpus.

    Returns:
        ``skipped`` (reason to file names) and ``cut`` (whether the end of a single document was held out).

    Raises:
        UserError: naming what the user can mend.
        RuntimeError: if LitData lost records.
    """
    from tst_lightning.data import tokenise

    documents, skipped = _check_files(job, report)
    train, val = split_documents(documents, held_out=job.held_out, seed=job.seed)
    splits = {"train": train, "val": val}

    prepared = Path(job.prepared)
    tokenizer_path = prepared / TOKENIZER
    if job.tokenizer is not None:
        shutil.copyfile(job.tokenizer, tokenizer_path)
    else:
        assert job.train_tokenizer is not None
        report.phase("training the tokenizer", _bytes(train))
        tokenise.train_tokenizer(
            train, job.train_tokenizer, tokenizer_path, lambda text: report.advance(_text_bytes(text))
        )
    tokenizer = tokenise.load_tokenizer(tokenizer_path, job.end_of_text)

    def advance(text: str, tokens: int) -> None:
        report.advance(_text_bytes(text), documents=not text, tokens=tokens)

    report.phase("tokenising", _bytes(documents))
    spooled = {}
    for name, part in splits.items():
        with _spool_path(job, name).open("wb") as spool:
            spooled[name] = tokenise.encode_documents(part, tokenizer, spool, advance)
        if ambiguous := spooled[name].ambiguous:
            skipped.setdefault(AMBIGUOUS, []).extend(document.path for document in ambiguous)
    empty = [name for name in splits if not spooled[name].split.documents]
    if empty:
        raise UserError(
            f"every document of {' and '.join(empty)} holds {tokenizer.end_of_text!r}, which this tokenizer "
            "cannot tell from its end-of-text token: name another one with --end-of-text"
        )

    report.phase("writing", 0)
    for name in splits:
        _write(job, name, spooled[name].split, tokenizer)
    Corpus(
        directory=prepared,
        tokenizer_sha256=file_sha256(tokenizer_path),
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        end_of_text_id=tokenizer.end_of_text_id,
        max_token_id=max(part.max_token_id for part in spooled.values()),
        dtype=tokenizer.dtype,
        record_tokens=job.record_tokens,
        splits={name: part.split for name, part in spooled.items()},
    ).save()
    return {"skipped": skipped, "cut": len(documents) == 1}


def _check_files(job: Job, report: Reporter) -> tuple[list[Document], dict[str, list[str]]]:
    documents: list[Document] = []
    skipped: dict[str, list[str]] = {}
    report.phase("checking the text", job.bytes)
    for path in job.files:
        checked = check_file(path, report.advance)
        if isinstance(checked, Document):
            documents.append(checked)
            report.advance(documents=1)
        else:
            skipped.setdefault(checked, []).append(path)
    if not documents:
        reasons = ", ".join(f"{len(paths)} {reason} ({paths[0]}, ...)" for reason, paths in skipped.items())
        way_out = "give files with text" if set(skipped) == {EMPTY} else "give readable UTF-8 text files"
        raise UserError(f"none of the {len(job.files)} input files is a document: {reasons}: {way_out}")
    return documents, skipped


def _write(job: Job, name: str, split: Split, tokenizer: TextTokenizer) -> None:
    """Turn a spooled split into a LitData directory of records."""
    # litdata empties these folders, which other programs of the same user may be using
    os.environ["DATA_OPTIMIZER_CACHE_FOLDER"] = str(Path(job.scratch, "litdata-cache"))
    os.environ["DATA_OPTIMIZER_DATA_CACHE_FOLDER"] = str(Path(job.scratch, "litdata-data"))
    from litdata import optimize
    from litdata.streaming import TemporalArrayLoader

    spool = _spool_path(job, name)
    directory = Path(job.prepared, name)
    needed = spool.stat().st_size + SPARE_BYTES
    free = shutil.disk_usage(job.prepared).free
    if free < needed:  # LitData 0.2.76 waits for ever for a writer that met a full disk
        raise OSError(errno.ENOSPC, f"No space left on device: {needed:,} bytes are needed for {name}, {free:,} free")
    optimize(
        fn=_Records(str(spool), tokenizer.dtype, job.record_tokens),
        inputs=list(range(-(-split.tokens // job.record_tokens))),
        output_dir=str(directory),
        chunk_bytes=CHUNK_BYTES,
        num_workers=1,  # it only copies
        reorder_files=False,
        keep_data_ordered=True,
        item_loader=TemporalArrayLoader(),
        # a spawned worker imports everything again, about three seconds; elsewhere forking is not safe
        start_method="fork" if sys.platform == "linux" else "spawn",
        verbose=False,
    )
    faults = split_faults(directory, tokens=split.tokens, record_tokens=job.record_tokens, dtype=tokenizer.dtype)
    if faults:
        raise RuntimeError(f"LitData did not write all of the {name} split: {'; '.join(faults)}")
    spool.unlink()


@dataclass(frozen=True)
class _Records:
    """Record ``index`` of a spooled stream."""

    spool: str
    dtype: str
    record_tokens: int

    def __call__(self, index: int) -> dict[str, NDArray[np.integer[Any]]]:
        import numpy as np

        dtype = np.dtype(self.dtype)
        offset = index * self.record_tokens * dtype.itemsize
        return {"tokens": np.fromfile(self.spool, dtype, count=self.record_tokens, offset=offset)}


def _spool_path(job: Job, name: str) -> Path:
    return Path(job.scratch, f"{name}.tokens")


def _bytes(documents: Sequence[Document]) -> int:
    return sum(document.bytes for document in documents)


def _text_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
