"""A table of finished and running runs, read from their directories.

Reads ``metrics.csv``; loads neither torch nor Lightning.
"""

from __future__ import annotations

import argparse
import csv
import sys
from dataclasses import dataclass
from pathlib import Path

from tst_lightning.errors import UserError
from tst_lightning.text import count


@dataclass(frozen=True)
class Run:
    """What one run's directory says.

    Attributes:
        name: the directory's name.
        steps: optimiser steps done.
        latent_tokens: positions that the model was run on.
        data_tokens: tokens of text read.
        bag_size: the largest bag size logged; 1 for a baseline.
        val_loss: held-out next-token loss in nats a token after ``val_step`` steps, None before any validation.
        val_step: the step of that validation.
    """

    name: str
    steps: int
    latent_tokens: int
    data_tokens: int
    bag_size: int
    val_loss: float | None
    val_step: int | None

    @classmethod
    def read(cls, directory: str | Path) -> Run:
        """Read a run's directory.

        Raises:
            UserError: if there is no run in it, or it has logged nothing yet.
        """
        directory = Path(directory)
        path = directory / "metrics.csv"
        if not path.is_file():
            raise UserError(f"{directory} holds no run (no metrics.csv in it)")
        rows = _rows(path)
        trained = [row for row in rows if row.get("tokens/latent")]
        if not trained:
            raise UserError(f"{directory}: the run has not logged a training step yet")
        validated = [row for row in rows if row.get("val/loss")]
        last = trained[-1]
        try:
            return cls(
                name=directory.resolve().name,
                steps=int(last["step"]),
                latent_tokens=int(last["tokens/latent"]),
                data_tokens=int(last["tokens/data"]),
                bag_size=max(int(row["phase/bag_size"]) for row in trained),
                val_loss=float(validated[-1]["val/loss"]) if validated else None,
                val_step=int(validated[-1]["step"]) if validated else None,
            )
        except (KeyError, ValueError) as error:
            raise UserError(f"{path} is damaged ({type(error).__name__}: {error})") from error


def _rows(path: Path) -> list[dict[str, str]]:
    """The rows of a log, without one that is being written right now."""
    try:
        text = path.read_bytes().decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error})") from error
    whole = text[: text.rfind("\n") + 1]
    rows = list(csv.DictReader(whole.splitlines()))
    if any(None in row or None in row.values() for row in rows):
        raise UserError(f"{path} is damaged: its rows have more or fewer values than its header")
    return rows


def table(runs: list[Run]) -> str:
    """The runs side by side, in plain text."""
    header = ["run", "largest bag", "steps", "latent tokens", "data tokens", "held-out loss (nats/token)"]
    cells = [header]
    for run in runs:
        loss = "none yet" if run.val_loss is None else f"{run.val_loss:.4f}"
        if run.val_step not in (None, run.steps):
            loss += f" (at step {run.val_step})"
        cells.append(
            [
                run.name,
                str(run.bag_size),
                str(run.steps),
                count(run.latent_tokens),
                count(run.data_tokens),
                loss,
            ]
        )
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's directory, such as runs/quickstart/tst")


def run(arguments: argparse.Namespace) -> int:
    """Print the table of the runs that there are.

    Raises:
        UserError: naming every directory that holds none, or a damaged one.
    """
    found: list[Run] = []
    faults: list[str] = []
    for directory in arguments.runs:
        try:
            found.append(Run.read(directory))
        except UserError as error:
            faults += error.faults
    if found:
        sys.stdout.write(table(found) + "\n")
    if faults:
        raise UserError(faults)
    return 0
