"""What `prepare`, `merge` and `import` say when they are done."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tst_lightning.data.corpus import Corpus
from tst_lightning.data.supervise import PrepareError, Stopped

if TYPE_CHECKING:
    from tst_lightning.data.parts import Skipped


@dataclass(frozen=True)
class Prepared:
    """A prepared corpus and what became of its input.

    Attributes:
        corpus: the sidecar.
        skipped: why documents were left out: how many, and the first few.
        cut: whether the end of a single document was held out, for want of a second one.
    """

    corpus: Corpus
    skipped: Skipped
    cut: bool = False

    def summary(self) -> str:
        """Lines for the user."""
        corpus = self.corpus
        known = [split.bytes or 0 for split in corpus.splits.values()]
        lines = [f"prepared {corpus.directory}"]
        for name, split in corpus.splits.items():
            text = ""
            if split.bytes is not None:
                text = f" {split.bytes:>16,} bytes ({split.bytes / sum(known):.1%})"
                text += f", {split.bytes / split.tokens:.2f} bytes a token"
            lines.append(f"  {name:<5} {split.documents:>11,} documents {split.tokens:>15,} tokens{text}")
        lines.append(
            f"  vocabulary of {corpus.vocab_size:,} ({corpus.dtype}); every document ends with "
            f"{corpus.end_of_text} (id {corpus.end_of_text_id})"
        )
        if self.cut:
            lines.append("  a single document was given: its end is held out, cut at a line break")
        lines += [f"  {line}" for line in skipped_lines(self.skipped)]
        lines.append(
            f"next: tst-lightning fit --config RECIPE.yaml --data.path {corpus.directory} "
            f"--model.network.init_args.config.vocab_size {corpus.vocab_size}"
        )
        return "\n".join(lines)


def skipped_lines(skipped: Skipped) -> list[str]:
    """One line for each reason, with the first few names."""
    lines = []
    for reason, (count, paths) in skipped.items():
        names = ", ".join(os.fsencode(path).decode(errors="replace") for path in paths)
        lines.append(f"skipped {count:,} ({reason}): {names}{', ...' if count > len(paths) else ''}")
    return lines


def reported(work: Callable[[], Prepared | str]) -> int:
    """Do the work of a command and print what came of it.

    Returns:
        The exit status: 0, 1 for a failure, 128 plus the signal when stopped.
    """
    try:
        made = work()
    except PrepareError as error:
        if error.log:
            sys.stderr.write(error.log.rstrip() + "\n")
        sys.stderr.write(f"error: {error}\n")
        return 1
    except Stopped as stop:
        sys.stderr.write(f"stopped: {stop.left}\n")
        return 128 + stop.signal
    sys.stdout.write((made if isinstance(made, str) else made.summary()) + "\n")
    return 0
