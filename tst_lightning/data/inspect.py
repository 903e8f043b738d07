"""Describe a prepared corpus, check every token of it and show some of its text."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import Any

from tst_lightning.data.corpus import ITEM_BYTES, Corpus
from tst_lightning.errors import UserError

_SAMPLE_TOKENS = 64


@dataclass(frozen=True)
class Sample:
    """How a document begins.

    Attributes:
        document: its number, over the splits in order.
        split: where it is.
        text: its first tokens, decoded.
    """

    document: int
    split: str
    text: str


@dataclass(frozen=True)
class Inspection:
    """What was found in a prepared directory.

    Attributes:
        corpus: what its sidecar says.
        chunks: number of chunk files of each split; None where LitData's index cannot be read.
        samples: how some documents begin.
        faults: one sentence for everything that is wrong; empty if the corpus is whole.
    """

    corpus: Corpus
    chunks: dict[str, int | None]
    samples: list[Sample]
    faults: list[str]

    def summary(self) -> str:
        """Lines for the user."""
        corpus = self.corpus
        lines = [
            str(corpus.directory),
            f"  tokenizer {corpus.tokenizer_sha256}",
            f"  vocabulary of {corpus.vocab_size:,}, largest id {corpus.max_token_id:,} ({corpus.dtype}, records of "
            f"{corpus.record_tokens:,}); every document ends with {corpus.end_of_text} (id {corpus.end_of_text_id})",
        ]
        for name, split in corpus.splits.items():
            count = self.chunks[name]
            size = "bytes of text unknown"
            if split.bytes is not None:
                size = f"{split.bytes:,} bytes, {split.bytes / split.tokens:.2f} bytes a token"
            lines.append(
                f"  {name:<5} {split.documents:>11,} documents {split.tokens:>15,} tokens, {size}, "
                f"{'no' if count is None else f'{count:,}'} chunk{'' if count == 1 else 's'}"
            )
            lines.append(f"        tokens {split.sha256}")
        for sample in self.samples:
            lines.append(f"document {sample.document:,} ({sample.split}):")
            lines += [f"    {_printable(line)}" for line in sample.text.split("\n")]
        if not self.faults:
            return "\n".join([*lines, "every chunk, token and hash is right"])
        faults = [f"  {fault}" for fault in self.faults]
        return "\n".join([*lines, "damaged:", *faults, "copy it again from where it is whole, or make it again"])

    def state(self) -> dict[str, Any]:
        """The same as plain values."""
        corpus = {name: value for name, value in vars(self.corpus).items() if name not in ("directory", "splits")}
        return {
            "directory": str(self.corpus.directory),
            **corpus,
            "splits": {
                name: {**asdict(split), "chunks": self.chunks[name]} for name, split in self.corpus.splits.items()
            },
            "samples": [asdict(sample) for sample in self.samples],
            "faults": self.faults,
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.epilog = "Exit status: 0 if everything is right, 1 if the corpus is damaged, 2 if it is none."
    parser.add_argument("directory", metavar="DIR", help="prepared directory, or its s3:// or gs:// URL")
    parser.add_argument(
        "--samples", type=int, default=3, metavar="N", help="documents whose beginning is shown (default: 3)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        The exit status: 0, or 1 if the corpus is damaged.

    Raises:
        UserError: naming what the user can mend.
    """
    found = inspect(args.directory, samples=args.samples, progress=True)
    output = json.dumps(found.state(), indent=2) if args.json else found.summary()
    sys.stdout.write(output.encode(sys.stdout.encoding, "backslashreplace").decode(sys.stdout.encoding) + "\n")
    return 1 if found.faults else 0


def inspect(directory: str | os.PathLike[str], *, samples: int = 3, progress: bool = False) -> Inspection:
    """Check a prepared corpus, every chunk and token of it, and decode the beginning of some documents.

    Args:
        directory: the prepared directory, or its URL in a store. A chunk at a time is held in memory.
        samples: documents to decode, spread evenly over the corpus.
        progress: show it on standard error.

    Raises:
        UserError: if the directory is no prepared corpus.
        StoreError: if a store cannot be read.
    """
    if samples < 0:
        raise UserError(f"--samples {samples} must be at least 0")
    corpus = Corpus.load(directory, check_files=False)

    from tst_lightning.data.supervise import Progress
    from tst_lightning.data.verify import Samples, chunk_list, corpus_faults

    last = sum(split.documents for split in corpus.splits.values()) - 1
    wanted = sorted({round(i * last / max(samples - 1, 1)) for i in range(samples)})
    taken = Samples(wanted, _SAMPLE_TOKENS, corpus.end_of_text_id)
    item_bytes = ITEM_BYTES[corpus.dtype]
    bar = Progress(progress)
    bar.phase("checking the tokens", item_bytes * sum(split.tokens for split in corpus.splits.values()))
    done = 0

    def advance(tokens: int) -> None:
        nonlocal done
        done += tokens
        bar.update(done * item_bytes, 0, done)

    finished = False
    try:
        faults = corpus_faults(corpus, taken, advance)
        finished = True
    finally:
        bar.close(finished=finished)
    chunks = {name: chunk_list(corpus, name) for name in corpus.splits}
    return Inspection(
        corpus=corpus,
        chunks={name: None if listed is None else len(listed) for name, listed in chunks.items()},
        samples=_decode(corpus, taken.found),
        faults=faults,
    )


def _decode(corpus: Corpus, found: dict[int, tuple[str, list[int]]]) -> list[Sample]:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(corpus.tokenizer_path.read_bytes())
    except Exception:  # noqa: BLE001 (tokenizers raises nothing more specific; its fault is among the others)
        return []
    return [
        Sample(
            number, split, tokenizer.decode([i for i in ids if 0 <= i < corpus.vocab_size], skip_special_tokens=False)
        )
        for number, (split, ids) in sorted(found.items())
    ]


def _printable(line: str) -> str:
    """A line of text with characters that a terminal would act on written out."""
    return "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in line)
