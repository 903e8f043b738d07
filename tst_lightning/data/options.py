"""Options that ``prepare``, ``merge`` and ``import`` share."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path

from tst_lightning.data.publish import output_faults
from tst_lightning.data.stores import StorePath, locate
from tst_lightning.errors import UserError

HELD_OUT = 0.01
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}


def add_assembly_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of how documents become a corpus."""
    parser.add_argument(
        "--held-out",
        type=float,
        metavar="FRACTION",
        help=f"share of the documents to hold out for validation, at least one (default: {HELD_OUT})",
    )
    parser.add_argument("--shuffle", action="store_true", help="put the training documents into a seeded order")
    parser.add_argument(
        "--max-tokens",
        metavar="N",
        help="take documents from the first on, up to so many tokens together: 300M, 1e9, 2B",
    )
    parser.add_argument("--seed", type=int, default=0, help="of --held-out and --shuffle (default: 0)")


def assembly_faults(held_out: float | None) -> list[str]:
    """What is wrong with them."""
    if held_out is not None and not 0 < held_out < 1:  # also true for nan
        return [f"--held-out {held_out} must lie between 0 and 1: 0.01 holds out one document in a hundred"]
    return []


def read_amount(given: int | str | None, faults: list[str]) -> int | None:
    """A number of tokens, also as ``300M``, ``2B`` or ``1e9``; what is wrong is added to ``faults``."""
    if given is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d*)?(?:e\d+)?)([kmbgt]?)", str(given).strip().lower().replace("_", ""))
    amount = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if amount < 1 or amount != int(amount):
        faults.append(f"--max-tokens {given} must be a whole number above 0, such as 300M or 1e9")
        return None
    return int(amount)


def find_output(
    output: str | os.PathLike[str], inputs: Sequence[str | os.PathLike[str]], faults: list[str]
) -> Path | StorePath:
    """Where the corpus goes, which must not exist; what is wrong is added to ``faults``."""
    given = os.fspath(output)
    try:
        found = locate(given)
    except UserError as error:
        faults += error.faults
        return Path(os.path.abspath("output"))
    if isinstance(found, StorePath):
        faults += output_faults(found)
        return found
    destination = Path(os.path.abspath(given))
    if os.path.lexists(destination):
        faults.append(f"--output {given} exists already: name another directory, or delete it")
    real = os.path.realpath(destination)
    for path in inputs:
        folder = os.path.realpath(path)
        if os.path.isdir(folder) and Path(real).is_relative_to(folder):
            faults.append(f"--output {given} lies in the input folder {path}: name a directory outside of it")
    return destination


def work_directory(output: Path | StorePath, work: str | os.PathLike[str] | None) -> Path:
    """Where unfinished work lies."""
    if work is not None:
        return Path(os.path.abspath(work))
    beside = output.parent if isinstance(output, Path) else Path.cwd()
    return beside / f"{output.name}.unfinished"
