"""Runs that differ in nothing but their seeds, taken together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import fmean

from tst_lightning.report.recipe import Recipe, Seeds
from tst_lightning.report.runs import Run, Validation


@dataclass(frozen=True)
class Group:
    """An arm: one recipe with one schedule, over its seeds.

    Attributes:
        label: what the names of its runs have in common, such as ``tst`` of ``seed-1/tst`` and ``seed-2/tst``.
        runs: all of them, in the report's order.
    """

    label: str
    runs: tuple[Run, ...]

    @property
    def recipe(self) -> Recipe:
        """What the runs share, with the first one's seeds."""
        assert self.runs[0].recipe is not None
        return self.runs[0].recipe

    @property
    def total_steps(self) -> int:
        """Optimiser steps of a finished run."""
        return self.recipe.schedule.total_steps

    @property
    def by_seeds(self) -> dict[Seeds, Run]:
        """The runs that can be compared; of those with equal seeds the first, and of unseeded ones only a lone one."""
        unseeded = self.unseeded
        sound: dict[Seeds, Run] = {}
        for run in self.runs:
            if run.fault is None and run not in unseeded:
                sound.setdefault(run.seeds, run)
        return sound

    @property
    def flops(self) -> int | None:
        """Training FLOPs of one finished run, None where the network's are unknown."""
        return next((run.flops for run in self.by_seeds.values()), None)

    @property
    def unseeded(self) -> list[Run]:
        """Sound runs without a seed where there are several: which belongs to which of the other arm's is unknown."""
        runs = [run for run in self.runs if run.fault is None and run.seeds.seed is None]
        return runs if len(runs) > 1 else []

    @property
    def repeats(self) -> list[tuple[Run, Run]]:
        """Sound runs with the seeds of an earlier one, each with that one."""
        first = self.by_seeds
        return [
            (run, first[run.seeds])
            for run in self.runs
            if run.fault is None and run.seeds in first and first[run.seeds] is not run
        ]

    def final_loss(self, seeds: Iterable[Seeds]) -> float:
        """The mean loss at the end, over these seeds."""
        return fmean(self.by_seeds[seed].final_loss for seed in seeds)


def group(runs: Sequence[Run]) -> list[Group]:
    """The arms in the order of their first runs; a run without ``run.json`` stands alone."""
    arms: dict[tuple[str | None, int], list[Run]] = {}
    for i, run in enumerate(runs):
        key = (None, i) if run.recipe is None else (run.recipe.arm, 0)
        arms.setdefault(key, []).append(run)
    labels = _labels([[run.name for run in members] for members in arms.values()])
    return [Group(label, tuple(members)) for label, members in zip(labels, arms.values(), strict=True)]


def mean_curve(runs: Sequence[Run]) -> list[Validation]:
    """The mean held-out loss at the steps at which every run was validated."""
    curves = [{validation.step: validation for validation in run.validations} for run in runs]
    return [
        Validation(step, fmean(c[step].data_tokens for c in curves), fmean(c[step].loss for c in curves))
        for step in curves[0]
        if all(step in curve for curve in curves)
    ]


def _labels(arms: Sequence[Sequence[str]]) -> list[str]:
    """The first of several ways to name an arm, by the names of its runs, that names no other arm too."""
    ways = [[names[0]] if len(names) == 1 else _ways(names) for names in arms]
    taken = Counter(way for own in ways for way in set(own))
    return [next((way for way in own if taken[way] == 1), own[-1]) for own in ways]


def _ways(names: Sequence[str]) -> list[str]:
    """The folder's name that all have, or what they share at both ends with a star for the rest, or all of them."""
    folders = {name.rpartition("/")[2] for name in names}
    start = _start(names)
    end = _start([name[len(start) :][::-1] for name in names])[::-1]
    return [*(folders if len(folders) == 1 else ()), *([f"{start}*{end}"] if start or end else ()), ", ".join(names)]


def _start(names: Sequence[str]) -> str:
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    return "".join(letters[0] for letters in alike)
