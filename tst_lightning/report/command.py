"""Compare runs: a table, and with --output a page with a picture."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tst_lightning.errors import UserError
from tst_lightning.report.compare import compare
from tst_lightning.report.find import find_runs, names
from tst_lightning.report.groups import group
from tst_lightning.report.page import PICTURE, Report, as_json, markdown, plain
from tst_lightning.report.runs import Run
from tst_lightning.report.words import machine_notes


def make_report(paths: Sequence[str], *, baseline: str | None = None, command: Sequence[str] = ()) -> Report:
    """Read the runs and compare them.

    Args:
        paths: directories of runs, or folders that are searched for them.
        baseline: a run to hold every arm against, instead of each one's own baseline.
        command: the words that make this report again.

    Raises:
        UserError: if ``baseline`` is none of the runs.
    """
    directories, problems = find_runs(paths)
    runs: list[Run] = []
    for directory, name in zip(directories, names(directories), strict=True):
        try:
            runs.append(Run.read(directory, name))
        except UserError as error:
            problems += error.faults
    groups = group(runs)
    try:
        comparisons, notes = compare(groups, baseline)
    except UserError as error:
        raise UserError([*problems, *error.faults]) from error
    notes += machine_notes(runs)
    return Report((*runs,), (*groups,), (*comparisons,), (*notes,), (*problems,), (*command,))


def write_report(report: Report, output: Path) -> None:
    """Write ``report.md``, ``report.json`` and ``loss.png``, each whole or not at all.

    Raises:
        UserError: if the directory cannot be written.
    """
    from tst_lightning.report.plot import draw

    # beside their places, so that a killed report never leaves half a file under its own name
    unfinished = {name: output / f".unfinished-{name}" for name in ("report.md", "report.json", PICTURE)}
    page, data, picture = unfinished.values()
    try:
        output.mkdir(parents=True, exist_ok=True)
        # what a path may hold and UTF-8 may not is shown escaped
        page.write_text(markdown(report), encoding="utf-8", errors="backslashreplace", newline="\n")
        data.write_text(as_json(report), encoding="utf-8", newline="\n")
        draw(report.groups, picture)
        for name, file in unfinished.items():
            os.replace(file, output / name)
    except OSError as error:
        raise UserError(f"--output {output} cannot be written ({error}): give another folder") from error
    finally:
        for file in unfinished.values():
            with suppress(OSError):
                file.unlink()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="a run's directory, such as runs/quickstart/tst, or a folder of runs"
    )
    parser.add_argument("--output", metavar="DIR", help="write report.md, report.json and loss.png there")
    parser.add_argument(
        "--baseline",
        metavar="NAME",
        help="hold every arm against this run, also where more than the phases differs (by default against the "
        "baseline of the same recipe and as many steps)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the report, and write it where asked to.

    Raises:
        UserError: naming everything that could not be read, after the rest was reported.
    """
    if "" in (*arguments.runs, arguments.output):
        raise UserError("an empty path was given: write . for the current folder")
    command = ["report", *arguments.runs]
    command += [] if arguments.output is None else ["--output", arguments.output]
    command += [] if arguments.baseline is None else ["--baseline", arguments.baseline]
    report = make_report(arguments.runs, baseline=arguments.baseline, command=command)
    if report.runs:
        sys.stdout.write(plain(report))
        if arguments.output is not None:
            write_report(report, Path(arguments.output))
    if report.problems:
        raise UserError(report.problems)
    return 0
