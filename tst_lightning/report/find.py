"""Which runs there are below the paths that the user gave, and what to call them."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path


def find_runs(paths: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Directories of runs: each path itself, or all those below it in alphabetical order, every one once.

    Links are followed. What a failed start left behind (``abandoned-N``) is not searched unless it is given.

    Returns:
        The directories, and a sentence for each path without any and each folder that cannot be read.
    """
    found: dict[str, Path] = {}  # by their real path
    faults: list[str] = []
    for path in map(Path, paths):
        try:
            is_folder = stat.S_ISDIR(path.stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            faults.append(f"{path} holds no run: there is no such folder")
            continue
        except OSError as error:
            faults.append(f"{path} cannot be read ({error})")
            continue
        runs = list(_search(path, faults))
        for run in runs:
            found.setdefault(os.path.realpath(run), run)
        if not is_folder:
            faults.append(f"{path} is a file: give the run's directory")
        elif not runs:
            faults.append(f"{path} holds no run (no metrics.csv in it or below)")
    return list(found.values()), faults


def _search(top: Path, faults: list[str]) -> Iterator[Path]:
    seen: set[str] = set()  # links can go round in circles

    def unreadable(error: OSError) -> None:
        if not isinstance(error, NotADirectoryError):
            faults.append(f"{error.filename} cannot be read ({error})")

    for folder, below, files in os.walk(top, followlinks=True, onerror=unreadable):
        real = os.path.realpath(folder)
        if "metrics.csv" in files or "run.json" in files:
            yield Path(folder)
            below.clear()
        elif real in seen:
            below.clear()
        else:
            below[:] = sorted(name for name in below if name != "checkpoints" and not name.startswith("abandoned-"))
        seen.add(real)


def names(directories: Sequence[Path]) -> list[str]:
    """The shortest end of each path that no other path has: ``tst``, or ``seed-1/tst``."""
    parts = [Path(os.path.abspath(directory)).parts for directory in directories]
    ends = Counter(own[-length:] for own in parts for length in range(1, len(own) + 1))
    return [
        _printable(Path(*next(end for n in range(1, len(own) + 1) if ends[end := own[-n:]] == 1 or n == len(own))))
        for own in parts
    ]


def _printable(path: Path) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(path))
