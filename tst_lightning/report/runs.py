"""One run, read from its directory: ``metrics.csv``, and ``run.json`` where there is one."""

from __future__ import annotations

import csv
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from tst_lightning.errors import UserError
from tst_lightning.report.recipe import Recipe, Seeds

_LOSSES = ("train/loss", "train/superposition_loss", "val/loss")


class Validation(NamedTuple):
    """Held-out next-token loss in nats a token after ``step`` steps and ``data_tokens`` tokens of text."""

    step: int
    data_tokens: float
    loss: float


@dataclass(frozen=True)
class Run:
    """What one run's directory says.

    Attributes:
        name: what the run is called in a report.
        directory: where it is, as the user wrote it.
        steps: optimiser steps done.
        latent_tokens: positions that the model was run on.
        data_tokens: tokens of text read.
        bag_size: the largest bag size so far; 1 for a baseline.
        flops: training FLOPs so far, None where the network's are unknown.
        wall_clock: seconds that the run has taken, None where they were not logged.
        validations: the held-out loss by step, finite or not.
        diverged_at: the first logged step whose loss is not a finite number.
        recipe: what ``run.json`` says, None without one.
    """

    name: str
    directory: str
    steps: int
    latent_tokens: int
    data_tokens: int
    bag_size: int
    flops: int | None
    wall_clock: float | None
    validations: tuple[Validation, ...]
    diverged_at: int | None
    recipe: Recipe | None

    @classmethod
    def read(cls, directory: Path, name: str) -> Run:
        """Read a run's directory.

        Raises:
            UserError: if the run has logged nothing yet, or its files are damaged.
        """
        path = directory / "metrics.csv"
        rows = _rows(path) if path.is_file() else []
        trained = [row for row in rows if row.get("tokens/latent")]
        if not trained:
            raise UserError(f"{directory}: the run has not logged a training step yet")
        recipe = Recipe.read(directory)
        last = trained[-1]
        try:
            if recipe is not None and int(last["step"]) > recipe.schedule.total_steps:
                raise ValueError(f"step {last['step']} of the {recipe.schedule.total_steps} in run.json")
            reading = _Reading(trained)
            losses = {int(row["step"]): float(row["val/loss"]) for row in rows if row.get("val/loss")}
            diverged = [
                int(row["step"])
                for row in rows
                if any(row.get(loss) and not math.isfinite(float(row[loss])) for loss in _LOSSES)
            ]
            return cls(
                name=name,
                directory=str(directory),
                steps=int(last["step"]),
                latent_tokens=_amount(last["tokens/latent"]),
                data_tokens=_amount(last["tokens/data"]),
                bag_size=_largest_bag(trained, recipe),
                flops=_amount(last["compute/flops"]) if last.get("compute/flops") else None,
                wall_clock=_seconds(last["time/wall_clock"]) if last.get("time/wall_clock") else None,
                validations=tuple(Validation(step, reading.tokens(step), losses[step]) for step in sorted(losses)),
                diverged_at=min(diverged, default=None),
                recipe=recipe,
            )
        except (ArithmeticError, KeyError, ValueError) as error:
            raise UserError(f"{path} is damaged ({type(error).__name__}: {error})") from error

    @property
    def val_loss(self) -> float | None:
        """The last held-out loss, None before any and where it is not a finite number."""
        return self.validations[-1].loss if self.validations and math.isfinite(self.validations[-1].loss) else None

    @property
    def val_step(self) -> int | None:
        """The step of the last validation."""
        return self.validations[-1].step if self.validations else None

    @property
    def final_loss(self) -> float:
        """The held-out loss at the end of a run that can be compared."""
        assert self.val_loss is not None
        return self.val_loss

    @property
    def total_steps(self) -> int | None:
        """Optimiser steps when the run is finished, None if unknown."""
        return None if self.recipe is None else self.recipe.schedule.total_steps

    @property
    def finished(self) -> bool | None:
        """Whether every step was trained and the last one validated, None if unknown."""
        return None if self.recipe is None else self.steps == self.total_steps == self.val_step

    @property
    def switch_steps(self) -> tuple[int, ...]:
        """The first step of every phase but the first, as far as the run has got to."""
        boundaries = () if self.recipe is None else self.recipe.schedule.boundaries
        return tuple(step for step in boundaries if step <= self.steps)

    def tokens_before(self, step: int) -> float:
        """Data tokens read before ``step``, one of :attr:`switch_steps`."""
        assert self.recipe is not None
        position = self.recipe.schedule.position
        return self.data_tokens * position(step) / position(self.steps)

    @property
    def seeds(self) -> Seeds:
        """The run's seeds."""
        return Seeds(None, None) if self.recipe is None else self.recipe.seeds

    @property
    def fault(self) -> str | None:
        """Why the run is compared with nothing, None if it can be compared."""
        if self.recipe is None:
            return "no run.json says how it was trained"
        if self.diverged_at is not None:
            return f"its loss is no finite number at step {self.diverged_at}"
        if self.steps != self.total_steps:
            return f"it is at step {self.steps} of {self.total_steps}"
        if self.val_step != self.total_steps:
            return f"it was not validated at its last step, {self.total_steps}"
        return None


class _Reading:
    """The text read by any step, from the rows of the training log.

    Exact for whatever was logged in between: the first and the last step of each phase have a row, and within
    a phase each step reads the same.
    """

    def __init__(self, trained: Sequence[dict[str, str]]) -> None:
        self.steps = [0, *(int(row["step"]) for row in trained)]
        self.data = [0, *(_amount(row["tokens/data"]) for row in trained)]
        for name, values in (("steps", self.steps), ("data tokens", self.data)):
            if any(a >= b for a, b in pairwise(values)):
                raise ValueError(f"its {name} do not ascend")
        last = trained[-1]
        self.per_step = int(last["phase/bag_size"]) * int(last["tokens/latent"]) / self.steps[-1]

    def tokens(self, step: int) -> float:
        i = bisect_left(self.steps, step)
        if i == len(self.steps):  # validated after the last row
            return self.data[-1] + (step - self.steps[-1]) * self.per_step
        if self.steps[i] == step:
            return self.data[i]
        if i == 0:
            raise ValueError(f"step {step}")
        share = (step - self.steps[i - 1]) / (self.steps[i] - self.steps[i - 1])
        return self.data[i - 1] + share * (self.data[i] - self.data[i - 1])


def _largest_bag(trained: Sequence[dict[str, str]], recipe: Recipe | None) -> int:
    """By the schedule where it is known: the log of a run that went on elsewhere begins at its checkpoint."""
    if recipe is None:
        return max(int(row["phase/bag_size"]) for row in trained)
    return max(phase.bag_size for phase in recipe.schedule.phases if phase.start < int(trained[-1]["step"]))


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError(f"{text} is no amount")
    return value


def _amount(text: str) -> int:
    return int(text) if text.isdecimal() else int(_seconds(text))


def _rows(path: Path) -> list[dict[str, str]]:
    """The rows of a log, without one that is being written right now."""
    try:
        text = path.read_bytes().decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error})") from error
    whole = text[: text.rfind("\n") + 1]
    try:
        rows = list(csv.DictReader(whole.splitlines()))
    except csv.Error as error:
        raise UserError(f"{path} is damaged ({error})") from error
    if any(None in row or None in row.values() for row in rows):
        raise UserError(f"{path} is damaged: its rows have more or fewer values than its header")
    return rows
