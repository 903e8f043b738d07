"""The global batch of every optimiser step, and what lies behind it. Imports neither torch nor Lightning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tst_lightning.phases import PhaseSchedule


@dataclass(frozen=True)
class Batches:
    """How many windows each optimiser step takes from the data, as a pure function of the step.

    Attributes:
        sizes: ``(first step, global batch size)`` pairs; the first is of step 0, each holds until the next.
        skipped: steps whose batch was thrown away in favour of the one after it, in ascending order; a step
            named twice threw two away.
    """

    sizes: tuple[tuple[int, int], ...]
    skipped: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        steps = [step for step, _ in self.sizes]
        assert steps and steps[0] == 0 and steps == sorted(set(steps))
        assert all(size >= 1 for _, size in self.sizes)
        assert list(self.skipped) == sorted(self.skipped) and all(step >= 0 for step in self.skipped)

    @classmethod
    def constant(cls, global_batch_size: int, skipped: Sequence[int] = ()) -> Batches:
        """The same size throughout."""
        return cls(((0, global_batch_size),), tuple(sorted(skipped)))

    def size(self, step: int) -> int:
        """The global batch size of ``step``."""
        return next(size for first, size in reversed(self.sizes) if first <= step)

    def resized(self, step: int, global_batch_size: int) -> Batches:
        """The same before ``step``, and ``global_batch_size`` from there on."""
        before = tuple(change for change in self.sizes if change[0] < step)
        if before and before[-1][1] == global_batch_size:
            return replace(self, sizes=before)
        return replace(self, sizes=(*before, (step, global_batch_size)))

    def latent_windows(self, step: int) -> int:
        """Windows that the model was trained on before ``step``, of whatever bag size."""
        stops = [first for first, _ in self.sizes[1:]] + [step]
        return sum(
            size * (min(stop, step) - first)
            for (first, size), stop in zip(self.sizes, stops, strict=True)
            if first < step
        )

    def data_windows(self, schedule: PhaseSchedule, step: int) -> int:
        """Plain windows of text that the model was trained on before ``step``: a bag of s tokens is s of them."""
        return sum(
            phase.bag_size * (self.latent_windows(min(step, phase.stop)) - self.latent_windows(phase.start))
            for phase in schedule.phases
            if phase.start < step
        )

    def position(self, schedule: PhaseSchedule, step: int) -> int:
        """Plain windows of text that lie behind when ``step`` begins to read: trained on or thrown away."""
        thrown_away = sum(schedule.at(skip).bag_size * self.size(skip) for skip in self.skipped if skip <= step)
        return self.data_windows(schedule, step) + thrown_away

    def skipping(self, steps: Sequence[int]) -> Batches:
        """The same with ``steps`` skipped at least as often as they are named there."""
        union = Counter(self.skipped) | Counter(steps)
        return replace(self, skipped=tuple(sorted(union.elements())))
