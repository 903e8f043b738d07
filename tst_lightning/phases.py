"""The phases of a run as pure functions of the optimiser step. Imports neither torch nor Lightning."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from tst_lightning.errors import UserError


@dataclass(frozen=True)
class Stage:
    """One superposition stage of the general, coarse-to-fine form.

    Attributes:
        bag_size: tokens a bag (s).
        ratio: this stage's share of the run's optimiser steps, in [0, 1].
        steps: the stage's length in optimiser steps, instead of ``ratio``.
    """

    bag_size: int
    ratio: float | None = None
    steps: int | None = None


@dataclass(frozen=True)
class Phases:
    """What a recipe says of its phases; :meth:`schedule` resolves it into steps.

    The short form is ``bag_size`` with ``ratio`` or ``switch_step``; ``stages`` is the general form.
    ``bag_size: 1`` or ``ratio: 0`` is the equal-FLOPs baseline.

    Attributes:
        bag_size: tokens a bag (s) in the superposition phase.
        ratio: share of the optimiser steps spent in the superposition phase (r), in [0, 1].
        switch_step: the first step of the recovery phase, instead of ``ratio``.
        stages: superposition stages in order, instead of the three above; the rest of the run is recovery.
        extension: steps at the end of the run that were added to it later: the shares above are of the steps before
            them, so that every boundary stays where it was, and only the last phase grows.
    """

    bag_size: int | None = None
    ratio: float | None = None
    switch_step: int | None = None
    stages: list[Stage] | None = None
    extension: int = 0

    def schedule(self, total_steps: int) -> PhaseSchedule:
        """Resolve into a schedule of ``total_steps`` optimiser steps, the extension among them.

        Raises:
            UserError: naming every fault at once.
        """
        faults: list[str] = []
        if not 0 <= self.extension < max(total_steps, 1):
            faults.append(
                f"phases.extension={self.extension} must be at least 0 and less than the run's {total_steps} steps"
            )
        short = {"bag_size": self.bag_size, "ratio": self.ratio, "switch_step": self.switch_step}
        given = [f"{name}={value}" for name, value in short.items() if value is not None]
        if self.stages is not None:
            if given:
                faults.append(
                    f"phases.stages and {', '.join(given)} are both given: keep one form and set the other to null"
                )
            stages = self.stages
        else:
            if self.ratio is not None and self.switch_step is not None:
                faults.append(
                    f"phases.ratio={self.ratio} and phases.switch_step={self.switch_step} both set the switch: keep "
                    "one and set the other to null"
                )
            bag_size = 1 if self.bag_size is None else self.bag_size
            length_given = self.ratio is not None or self.switch_step is not None
            if bag_size != 1 and not length_given:
                faults.append(
                    f"phases.bag_size={bag_size} needs phases.ratio (0.2 to 0.4 in the paper) or phases.switch_step"
                )
            if self.bag_size is None and (self.ratio or self.switch_step):
                faults.append(f"{', '.join(given)} needs phases.bag_size (4 to 8 in the paper; 1 is the baseline)")
            stages = [Stage(bag_size, self.ratio, self.switch_step)] if length_given and not faults else []
        if faults:
            raise UserError(faults)
        return PhaseSchedule.from_stages(stages, total_steps - self.extension).lengthened(total_steps)


@dataclass(frozen=True)
class Phase:
    """A stretch of optimiser steps ``start <= step < stop`` that folds ``bag_size`` tokens into a position."""

    bag_size: int
    start: int
    stop: int

    @property
    def name(self) -> str:
        """``superposition``, or ``recovery`` for plain next-token prediction."""
        return "recovery" if self.bag_size == 1 else "superposition"

    @property
    def reads(self) -> str:
        """What a position is made of, for people: ``plain tokens`` or ``bags of 4``."""
        return "plain tokens" if self.bag_size == 1 else f"bags of {self.bag_size}"

    @property
    def steps(self) -> int:
        """Optimiser steps in this phase."""
        return self.stop - self.start


@dataclass(frozen=True)
class PhaseSchedule:
    """Which phase each optimiser step belongs to, and how much data was read before it.

    The phases follow each other without a gap from step 0 to ``total_steps``; neighbours differ in bag size.
    Build one with :meth:`from_ratio` or :meth:`from_stages`.
    """

    phases: tuple[Phase, ...]

    def __post_init__(self) -> None:
        assert self.phases and self.phases[0].start == 0
        assert all(phase.start < phase.stop and phase.bag_size >= 1 for phase in self.phases)
        assert all(
            a.stop == b.start and a.bag_size != b.bag_size for a, b in zip(self.phases, self.phases[1:], strict=False)
        )

    @classmethod
    def from_ratio(cls, bag_size: int, ratio: float, total_steps: int) -> PhaseSchedule:
        """The paper's two phases: ``ratio`` of the steps on bags of ``bag_size``, the rest on plain tokens.

        The switch is at ``ratio * total_steps`` rounded to the nearest step, halves up, computed exactly on
        the decimal number that was written (0.29 of 100 steps is 29).

        Raises:
            UserError: naming every fault at once.
        """
        return Phases(bag_size=bag_size, ratio=ratio).schedule(total_steps)

    @classmethod
    def from_stages(cls, stages: Sequence[Stage], total_steps: int) -> PhaseSchedule:
        """Superposition stages in order, then recovery for what is left of ``total_steps``.

        Boundaries given by ratio are the *cumulative* ratio times ``total_steps``, rounded to the nearest
        step, halves up, so that rounding never accumulates; a stage in ``steps`` is that long exactly.

        Raises:
            UserError: naming every fault at once.
        """
        if total_steps < 1:
            raise UserError(f"a run needs at least one optimiser step, not {total_steps}: set trainer.max_steps")
        faults: list[str] = []
        bounds: list[tuple[int, int]] = []  # (bag size, exclusive end)
        end = Fraction(0)
        for i, stage in enumerate(stages):
            where = f"phase {i + 1} of {len(stages)}" if len(stages) > 1 else "phases"
            if stage.bag_size < 1:
                faults.append(f"{where}: bag_size={stage.bag_size} must be at least 1")
            if (stage.ratio is None) == (stage.steps is None):
                faults.append(f"{where}: give ratio or steps, one of them")
                continue
            if stage.ratio is not None:
                if not 0 <= stage.ratio <= 1:  # also false for nan
                    faults.append(f"{where}: ratio={stage.ratio} must lie in [0, 1]")
                    continue
                length = Fraction(str(stage.ratio)) * total_steps
            else:
                assert stage.steps is not None
                if stage.steps < 0:
                    faults.append(f"{where}: {stage.steps} steps must not be negative")
                    continue
                length = Fraction(stage.steps)
            start, end = _round_half_up(end), end + length
            if length and stage.bag_size != 1 and _round_half_up(end) == start:
                faults.append(
                    f"{where}: ratio={stage.ratio} of {total_steps} steps rounds to no step at all: "
                    "raise it, or set ratio=0 for the baseline"
                )
            bounds.append((stage.bag_size, _round_half_up(end)))
        if end > total_steps:
            faults.append(
                f"the superposition stages take {_round_half_up(end)} of {total_steps} steps: shorten them, or raise "
                "trainer.max_steps"
            )
        if faults:
            raise UserError(faults)
        return cls._from_bounds([*bounds, (1, total_steps)])

    @classmethod
    def _from_bounds(cls, bounds: Iterable[tuple[int, int]]) -> PhaseSchedule:
        phases: list[Phase] = []
        start = 0
        for bag_size, stop in bounds:
            if stop == start:
                continue
            if phases and phases[-1].bag_size == bag_size:
                phases[-1] = Phase(bag_size, phases[-1].start, stop)
            else:
                phases.append(Phase(bag_size, start, stop))
            start = stop
        return cls(tuple(phases))

    def lengthened(self, total_steps: int) -> PhaseSchedule:
        """The same with a last phase that ends at ``total_steps``."""
        *before, last = self.phases
        return PhaseSchedule((*before, replace(last, stop=total_steps)))

    @property
    def total_steps(self) -> int:
        """Optimiser steps in the whole run."""
        return self.phases[-1].stop

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The first step of every phase but the first."""
        return tuple(phase.start for phase in self.phases[1:])

    def at(self, step: int) -> Phase:
        """The phase of optimiser step ``step`` (counted from 0).

        Raises:
            IndexError: if the step is outside ``[0, total_steps)``.
        """
        for phase in self.phases:
            if phase.start <= step < phase.stop:
                return phase
        raise IndexError(f"step {step} is outside the run's [0, {self.total_steps})")

    def position(self, step: int) -> int:
        """Plain windows (of L tokens) that each place of the batch has read before ``step``.

        A superposition step with bag size s reads s of them, a recovery step one. Multiplied by the global
        batch and by L this is the number of data tokens.

        Raises:
            IndexError: if the step is outside ``[0, total_steps]``.
        """
        if not 0 <= step <= self.total_steps:
            raise IndexError(f"step {step} is outside the run's [0, {self.total_steps}]")
        return sum(
            phase.bag_size * (min(step, phase.stop) - phase.start) for phase in self.phases if phase.start < step
        )

    def latent_tokens(self, step: int, *, global_batch_size: int, latent_length: int) -> int:
        """Positions that the model was run on before ``step``: what compute is proportional to."""
        self.position(step)  # the same bounds
        return step * global_batch_size * latent_length

    def data_tokens(self, step: int, *, global_batch_size: int, latent_length: int) -> int:
        """Tokens of text read before ``step``."""
        return self.position(step) * global_batch_size * latent_length

    def to_dict(self) -> dict[str, Any]:
        """Plain types, for a checkpoint."""
        return {"phases": [[phase.bag_size, phase.start, phase.stop] for phase in self.phases]}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> PhaseSchedule:
        """The inverse of :meth:`to_dict`."""
        return cls(tuple(Phase(*map(int, phase)) for phase in state["phases"]))

    def __str__(self) -> str:
        return ", ".join(f"bag {phase.bag_size} for steps {phase.start}-{phase.stop - 1}" for phase in self.phases)


def _round_half_up(value: Fraction) -> int:
    return math.floor(value + Fraction(1, 2))
