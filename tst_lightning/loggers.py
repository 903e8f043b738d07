"""CSV and TensorBoard logs that a resumed run continues in place, and the run's own description.

Lightning's CSVLogger deletes an existing ``metrics.csv`` (as of 2.6.6) and neither logger knows what a
checkpoint had already seen. Both classes here can say where they stand (:meth:`place`, stored in the
checkpoint) and go back there (:meth:`rewind`), so that no row is missing or doubled after a resume.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities import rank_zero_only


def is_rank_zero() -> bool:
    """Whether this process is the one that writes, also before a Trainer exists."""
    return bool(rank_zero_only.rank == 0)  # type: ignore[attr-defined]  # Lightning sets it at import


@runtime_checkable
class ResumableLogger(Protocol):
    """A logger whose files can be taken back to where a checkpoint was saved."""

    def place(self) -> dict[str, Any]:
        """Flush, and describe what is in the files now, in plain types."""

    def rewind(self, place: dict[str, Any]) -> None:
        """Drop everything that was written after ``place``; ``{}`` drops everything."""

    def holds_a_run(self) -> bool:
        """Whether anything was logged in its directory, by an earlier run too."""

    @property
    def log_dir(self) -> str | None:
        """Where the files are."""


class MetricsCSV(CSVLogger):
    """``metrics.csv`` in the run's directory, one row a logged step, written when it is logged; and ``run.json``.

    Args:
        directory: the run's directory.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        # every row goes to the file at once: logging is rare, and a killed run loses nothing
        super().__init__(save_dir=os.fspath(directory), name="", version="", flush_logs_every_n_steps=1)

    @property
    def experiment(self) -> Any:
        """The writer of the file (a no-op off rank 0)."""
        if is_rank_zero() and self._experiment is None:
            self._experiment = _ContinuingWriter(log_dir=self.log_dir)
        return super().experiment

    @rank_zero_only
    def log_hyperparams(self, params: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Write ``run.json``, what defines the run, for whatever reads the directory later (``report``)."""
        path = Path(self.log_dir, "run.json")
        temporary = path.with_name(f"{path.name}.tmp")
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(params, indent=2) + "\n", encoding="utf-8")
        temporary.replace(path)

    def place(self) -> dict[str, Any]:
        """The number of rows in the file."""
        self.save()
        return {"rows": len(self.experiment.read()[1])}

    def rewind(self, place: dict[str, Any]) -> None:
        """Keep the first ``place["rows"]`` rows."""
        self.experiment.keep(place.get("rows", 0))

    def holds_a_run(self) -> bool:
        """Whether there is a row."""
        return bool(self.experiment.read()[1])


class _ContinuingWriter(ExperimentWriter):
    """Adopts a file that is already there, and rewrites it only atomically."""

    def __init__(self, log_dir: str) -> None:
        super().__init__(log_dir)
        self.metrics_keys = self.read()[0]

    def _check_log_dir_exists(self) -> None:
        """Lightning would delete the file here."""

    def read(self) -> tuple[list[str], list[dict[str, str]]]:
        """Header and rows of the file as it is on disk."""
        if not os.path.exists(self.metrics_file_path):
            return [], []
        with open(self.metrics_file_path, newline="") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
            return list(reader.fieldnames or []), rows

    def keep(self, count: int) -> None:
        """Drop all rows but the first ``count``."""
        header, rows = self.read()
        if count == 0 and header:
            os.remove(self.metrics_file_path)
            self.metrics_keys = []
        elif count < len(rows):
            self._replace(header, rows[:count])

    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        self._replace(fieldnames, self.read()[1])

    def _replace(self, header: list[str], rows: list[dict[str, str]]) -> None:
        temporary = f"{self.metrics_file_path}.tmp"
        with open(temporary, "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=header)
            writer.writeheader()
            writer.writerows(rows)
        os.replace(temporary, self.metrics_file_path)


class TensorBoard(TensorBoardLogger):
    """TensorBoard event files in the run's directory.

    Args:
        directory: the run's directory.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        super().__init__(save_dir=os.fspath(directory), name="", version="", default_hp_metric=False)

    @rank_zero_only
    def save(self) -> None:
        """Flush, without the ``hparams.yaml`` that Lightning adds: the run's ``config.yaml`` says it all."""
        self.experiment.flush()

    def place(self) -> dict[str, Any]:
        """The length in bytes of every event file, whole records all of them."""
        self.save()
        return {"bytes": {path.name: path.stat().st_size for path in self._event_files()}}

    def rewind(self, place: dict[str, Any]) -> None:
        """Cut each event file back to its length then, and remove those that began later."""
        kept = place.get("bytes", {})
        for path in self._event_files():
            if path.name in kept:
                os.truncate(path, min(kept[path.name], path.stat().st_size))
            elif path.name != self._current():
                path.unlink()

    def holds_a_run(self) -> bool:
        """Whether there are event files of an earlier run."""
        return any(path.name != self._current() for path in self._event_files())

    def _current(self) -> str:
        return Path(self.experiment.file_writer.event_writer._file_name).name

    def _event_files(self) -> list[Path]:
        return sorted(Path(self.log_dir).glob("events.out.tfevents.*"))
