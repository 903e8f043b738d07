"""Which windows every optimiser step reads, as pure integer arithmetic: random access, no state, no torch.

Each corpus is one flat stream of tokens, cut into *units* of ``unit_windows * latent_length`` tokens. Units
fill an endless sequence of *slots*, a fresh permutation of all of a corpus's units each epoch. In a mixture, the
slots of every global batch are dealt out to the corpora in exact proportion (:mod:`tst_lightning.data.mixture`).
``group_batches`` global batches of consecutive slots form a *group*, a matrix of windows::

                  slot 0   slot 1   slot 2   ...
    row 0            plain window 0 of each unit
    row 1            plain window 1 of each unit
    ...

A step with bag size s and a global batch of B takes B *pieces*, s rows of one slot each, one piece after the
other: of the slot that was read least, the leftmost among equals. So a stage reads the first s rows of every
slot, then the next s rows of every slot, and after a switch in the middle of a group the next stage reads the
rows that are left, from the top down; a group that is used up is followed by the next, if need be within a step.
Nothing is skipped or read twice, and consecutive steps read text that is far apart.

Units, slots and groups know nothing of the phases: every arm of a comparison reads the same units in the same
order. Nor do they know of processes, workers or micro-batches (:mod:`tst_lightning.data.distribute` cuts a
finished batch), nor of a global batch that changes on the way: the first one shapes the groups for good.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

from tst_lightning.batches import Batches
from tst_lightning.data.mixture import Shares
from tst_lightning.data.permutation import Permutation
from tst_lightning.errors import UserError
from tst_lightning.phases import PhaseSchedule
from tst_lightning.text import either, one_of

UNIT_WINDOWS = 48
"""Plain windows a unit, unless a recipe says otherwise: bag sizes 2, 3, 4, 6, 8, 12, 16 and 24 divide it."""

GROUP_BATCHES = 16
"""Global batches of units that are read side by side."""


class Window(NamedTuple):
    """A stretch of ``bag_size * latent_length`` tokens from ``start`` on.

    Attributes:
        start: its first token in the flat stream.
        bag_size: tokens a bag (s); 1 is a plain window.
        source: which corpus of a mixture.
    """

    start: int
    bag_size: int
    source: int = 0


@dataclass(frozen=True)
class DataOrder:
    """The training windows of every optimiser step.

    Attributes:
        schedule: bag size of every step; each one divides ``unit_windows`` and the preceding one.
        tokens: length of each corpus. What does not fill a unit at its end is never read.
        latent_length: bags a window (L).
        batches: global batch size of every step, over all processes and micro-batches; the first one shapes the
            order for good.
        seed: fixes the permutation of the units in every epoch.
        weights: share of the windows of each corpus; they need not add up to 1, and are taken as the decimal
            numbers that were written.
        unit_windows: plain windows a unit.
        group_batches: global batches of units a group.

    Raises:
        UserError: naming every fault at once.
    """

    schedule: PhaseSchedule
    tokens: tuple[int, ...]
    latent_length: int
    batches: Batches
    seed: int
    weights: tuple[float, ...] = (1.0,)
    unit_windows: int = UNIT_WINDOWS
    group_batches: int = GROUP_BATCHES

    def __post_init__(self) -> None:
        assert self.group_batches >= 1 and len(self.tokens) == len(self.weights) >= 1
        faults = order_faults(self.schedule, self.unit_windows)
        if self.latent_length < 1:
            faults.append(f"data.latent_length={self.latent_length} must be at least 1")
        faults += weight_faults(self.weights)
        if min(self.unit_windows, self.latent_length) >= 1:
            faults += [self._too_short(source) for source in range(len(self.tokens)) if self.units(source) < 1]
        if faults:
            raise UserError(faults)

    def units(self, source: int) -> int:
        """Whole units in a corpus."""
        return self.tokens[source] // (self.unit_windows * self.latent_length)

    @property
    def identity(self) -> dict[str, Any]:
        """All that fixes the order besides the phases and changes of the global batch, in plain types."""
        return {
            "seed": self.seed,
            "tokens": [*self.tokens],
            "weights": [str(share) for share in self.shares],
            "latent_length": self.latent_length,
            "unit_windows": self.unit_windows,
            "global_batch_size": self._places,
            "group_batches": self.group_batches,
        }

    @property
    def shares(self) -> tuple[Fraction, ...]:
        """The weights, exact, adding up to 1."""
        exact = [Fraction(str(weight)) for weight in self.weights]
        return tuple(weight / sum(exact) for weight in exact)

    def batch(self, step: int) -> list[Window]:
        """The windows of optimiser step ``step``, in an order that never changes.

        Raises:
            IndexError: if the step is outside the run.
        """
        bag_size = self.schedule.at(step).bag_size
        left = self.batches.size(step)
        group, place = divmod(self.batches.position(self.schedule, step), self._group_slots * self.unit_windows)
        windows: list[Window] = []
        while left:
            layout = _group_layout(self, group)
            index = bisect_right(layout.positions, place) - 1
            offset = (place - layout.positions[index]) // bag_size
            for strip in layout.strips[index:]:
                assert strip.bag_size == bag_size
                slots = range(strip.slot + offset, min(strip.slot + offset + left, strip.stop))
                windows += self._windows(group, slots, strip)
                left -= len(slots)
                offset = 0
                if not left:
                    break
            group, place = group + 1, 0
        return windows

    def unit(self, slot: int) -> tuple[int, int]:
        """The corpus and its unit that fill a slot of the endless sequence."""
        column, place = divmod(slot, self._places)
        return _column_units(self, column)[place]

    def epochs(self, step: int, source: int = 0) -> float:
        """How often a corpus was read before ``step``: above 1, some text was read again.

        Raises:
            IndexError: if the step is outside ``[0, total_steps]``.
        """
        self.schedule.position(step)  # the same bounds
        windows = self.batches.position(self.schedule, step) * self.shares[source]
        return float(windows / (self.units(source) * self.unit_windows))

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def __hash__(self) -> int:
        return self._hash  # the caches below ask for it at every step

    def _windows(self, group: int, slots: range, strip: _Strip) -> list[Window]:
        """The pieces of a strip that lie in ``slots`` of the group."""
        found = []
        slot, stop = group * self._group_slots + slots.start, group * self._group_slots + slots.stop
        while slot < stop:
            column, place = divmod(slot, self._places)
            units = _column_units(self, column)[place : place + stop - slot]
            found += [
                Window((unit * self.unit_windows + strip.row) * self.latent_length, strip.bag_size, source)
                for source, unit in units
            ]
            slot += len(units)
        return found

    @property
    def _places(self) -> int:
        """Slots a column: the global batch size that the run began with."""
        return self.batches.sizes[0][1]

    @property
    def _group_slots(self) -> int:
        return self._places * self.group_batches

    def _runs(self, group: int) -> list[tuple[int, int]]:
        """The bag sizes with which a group is read, one after the other, and in how many pieces."""
        size = self._group_slots * self.unit_windows
        runs = []
        for phase in self.schedule.phases:
            # in plain windows; multiples of the phase's bag size, as are the ends of a group
            start = max(self._phase_start(phase.start), group * size)
            stop = min(self._phase_start(phase.stop), (group + 1) * size)
            if start < stop:
                runs.append((phase.bag_size, (stop - start) // phase.bag_size))
        return runs

    def _phase_start(self, step: int) -> int:
        """The position at which the phase that starts at ``step`` begins to read: what it skips itself lies behind."""
        return self.batches.position(self.schedule, step) - sum(
            self.schedule.at(step).bag_size * self.batches.size(step) for skip in self.batches.skipped if skip == step
        )

    def _too_short(self, source: int) -> str:
        tokens = self.tokens[source]
        ways = []
        multiple = math.lcm(*(phase.bag_size for phase in self.schedule.phases))
        unit_windows = tokens // self.latent_length // multiple * multiple
        if unit_windows >= 1:
            ways.append(f"set data.unit_windows to {unit_windows} or a smaller multiple of {multiple}")
        if tokens >= self.unit_windows:
            ways.append(f"set data.latent_length to at most {tokens // self.unit_windows}")
        ways.append("prepare more text")
        which = "the corpus" if len(self.tokens) == 1 else f"corpus {source + 1} of {len(self.tokens)}"
        return (
            f"{which} has {tokens} tokens, but a unit takes {self.unit_windows * self.latent_length} "
            f"(data.unit_windows={self.unit_windows} times data.latent_length={self.latent_length}): "
            f"{either(ways)}"
        )


class _Strip(NamedTuple):
    """Pieces that are read one after the other: ``bag_size`` rows from ``row`` on of the slots ``slot`` to ``stop``."""

    bag_size: int
    row: int
    slot: int
    stop: int


class _Layout(NamedTuple):
    """A group's strips in the order of reading, and the plain windows of the group that lie before each."""

    strips: tuple[_Strip, ...]
    positions: tuple[int, ...]


def weight_faults(weights: Sequence[float]) -> list[str]:
    """Every weight of a mixture that makes no sense."""
    return [
        f"data.sources: weight={weight} must be a number above 0" for weight in weights if not 0 < weight < math.inf
    ]


def order_faults(schedule: PhaseSchedule, unit_windows: int) -> list[str]:
    """Every reason why these phases cannot read units of ``unit_windows``, with values that would work."""
    if unit_windows < 1:
        return [f"data.unit_windows={unit_windows} must be at least 1 (the default is {UNIT_WINDOWS})"]
    faults = []
    bag_sizes = [phase.bag_size for phase in schedule.phases]
    for previous, bag_size in zip([None, *bag_sizes], bag_sizes, strict=False):
        if unit_windows % bag_size:
            ways = [f"set data.unit_windows to a multiple of {bag_size}"]
            if found := divisors(unit_windows)[1:]:
                ways.insert(0, f"use {one_of(found)}")
            faults.append(f"bag size {bag_size} does not divide data.unit_windows={unit_windows}: {either(ways)}")
        if previous is not None and previous % bag_size:
            ways = []
            if found := [d for d in divisors(math.gcd(previous, unit_windows))[1:] if d < previous]:
                ways.append(f"use {one_of(found)}")
            if multiples := [d for d in divisors(unit_windows) if d > bag_size and d % bag_size == 0]:
                ways.append(f"use {one_of(multiples)} before it")
            ways.append("leave out one of the two stages")
            faults.append(
                f"bag size {bag_size} does not divide {previous}, the bag size of the stage before it: {either(ways)}"
            )
    return faults


# The caches only save time: a group's layout and its columns' units are asked for again at every step of the group.


@lru_cache(maxsize=64)
def _permutation(size: int, *keys: int) -> Permutation:
    return Permutation(size, *keys)


@lru_cache(maxsize=16)
def _shares(weights: tuple[Fraction, ...], places: int) -> Shares:
    return Shares(weights, places)


@lru_cache(maxsize=4 * GROUP_BATCHES)
def _column_units(order: DataOrder, column: int) -> tuple[tuple[int, int], ...]:
    """The corpus and the unit of each slot of a column."""
    units = []
    for source, number in _shares(order.shares, order._places).places(column):
        epoch, place = divmod(number, order.units(source))
        keys = (order.seed, epoch, source) if source else (order.seed, epoch)
        units.append((source, _permutation(order.units(source), *keys)(place)))
    return tuple(units)


@lru_cache(maxsize=16)
def _group_layout(order: DataOrder, group: int) -> _Layout:
    """In which strips a group is read."""
    strips: list[_Strip] = []
    levels = [(0, 0, order._group_slots)]  # (rows read, first slot, stop), by slot; neighbours differ in the rows read
    for bag_size, pieces in order._runs(group):
        while pieces:
            index = min(range(len(levels)), key=lambda i: levels[i])  # the least read, the leftmost among equals
            row, slot, stop = levels[index]
            cut = min(stop, slot + pieces)
            strips.append(_Strip(bag_size, row, slot, cut))
            pieces -= cut - slot
            levels[index : index + 1] = [(row + bag_size, slot, cut), (row, cut, stop)]
            levels = _merged(levels)
    read = accumulate((strip.bag_size * (strip.stop - strip.slot) for strip in strips), initial=0)
    return _Layout(tuple(strips), tuple(read)[:-1])


def _merged(levels: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The same without empty parts, and with equal neighbours as one."""
    merged: list[tuple[int, int, int]] = []
    for row, slot, stop in levels:
        if slot == stop:
            continue
        if merged and merged[-1][0] == row:
            slot = merged.pop()[1]
        merged.append((row, slot, stop))
    return merged


def divisors(number: int) -> list[int]:
    """What divides ``number``, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]
