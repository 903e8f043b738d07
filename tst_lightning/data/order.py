"""Which windows every optimiser step reads, as pure integer arithmetic: random access, no state, no torch.

The corpus is one flat stream of tokens, cut into *units* of ``unit_windows * latent_length`` tokens. Units
fill an endless sequence of *slots*, a fresh permutation of all of them each epoch. ``group_batches`` global
batches of consecutive slots form a *group*, a matrix of windows::

                 column 0              column 1         ...   one column is global_batch_size units
    row 0   window 0 of each     window 0 of each
    row 1   window 1 of each     window 1 of each            one row is a plain window of each unit
    ...

A step with bag size s reads the next s rows of one column: of the column that was read least, the leftmost
among equals. So a stage reads the first s rows of every column, then the next s rows of every column, and
after a switch in the middle of a group the next stage reads the rows that are left, from the top down.
Nothing is skipped or read twice, and consecutive steps read text that is far apart.

Units, slots and groups know nothing of the phases: every arm of a comparison reads the same units in the same
order. Nor do they know of processes, workers or micro-batches: :func:`shard` cuts a finished batch.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from tst_lightning.errors import UserError
from tst_lightning.phases import PhaseSchedule

UNIT_WINDOWS = 48
"""Plain windows a unit, unless a recipe says otherwise: bag sizes 2, 3, 4, 6, 8, 12, 16 and 24 divide it."""

GROUP_BATCHES = 16
"""Global batches of units that are read side by side."""


class Window(NamedTuple):
    """A stretch of ``bag_size * latent_length`` tokens from ``start`` on.

    Attributes:
        start: its first token in the flat stream.
        bag_size: tokens a bag (s); 1 is a plain window.
    """

    start: int
    bag_size: int


class HeldOutWindow(NamedTuple):
    """A plain window of the held-out text, and whether it counts or only fills up the batch."""

    window: Window
    counts: bool


@dataclass(frozen=True)
class DataOrder:
    """The training windows of every optimiser step.

    Attributes:
        schedule: bag size of every step; each one divides ``unit_windows`` and the preceding one.
        tokens: length of the corpus. What does not fill a unit at its end is never read.
        latent_length: bags a window (L).
        global_batch_size: windows an optimiser step reads, over all processes and micro-batches.
        seed: fixes the permutation of the units in every epoch.
        unit_windows: plain windows a unit.
        group_batches: global batches of units a group.

    Raises:
        UserError: naming every fault at once.
    """

    schedule: PhaseSchedule
    tokens: int
    latent_length: int
    global_batch_size: int
    seed: int
    unit_windows: int = UNIT_WINDOWS
    group_batches: int = GROUP_BATCHES

    def __post_init__(self) -> None:
        assert self.group_batches >= 1
        faults = order_faults(self.schedule, self.unit_windows)
        if self.latent_length < 1:
            faults.append(f"data.latent_length={self.latent_length} must be at least 1")
        if self.global_batch_size < 1:
            faults.append(f"data.global_batch_size={self.global_batch_size} must be at least 1")
        if min(self.unit_windows, self.latent_length) >= 1 and self.units < 1:
            faults.append(self._too_short())
        if faults:
            raise UserError(faults)

    @property
    def units(self) -> int:
        """Whole units in the corpus."""
        return self.tokens // (self.unit_windows * self.latent_length)

    @property
    def identity(self) -> dict[str, int]:
        """All that fixes the order besides the phases, in plain types."""
        return {
            "seed": self.seed,
            "tokens": self.tokens,
            "latent_length": self.latent_length,
            "unit_windows": self.unit_windows,
            "global_batch_size": self.global_batch_size,
            "group_batches": self.group_batches,
        }

    def batch(self, step: int) -> list[Window]:
        """The ``global_batch_size`` windows of optimiser step ``step``, in an order that never changes.

        Raises:
            IndexError: if the step is outside the run.
        """
        bag_size = self.schedule.at(step).bag_size
        column, row = self._cell(step)
        return [
            Window((unit * self.unit_windows + row) * self.latent_length, bag_size)
            for unit in _column_units(self, column)
        ]

    def unit(self, slot: int) -> int:
        """The unit that fills a slot of the endless sequence."""
        epoch, place = divmod(slot, self.units)
        return _permutation(self.units, self.seed, epoch)(place)

    def epochs(self, step: int) -> float:
        """How often the corpus was read before ``step``: above 1, some text was read again.

        Raises:
            IndexError: if the step is outside ``[0, total_steps]``.
        """
        return self.schedule.position(step) * self.global_batch_size / (self.units * self.unit_windows)

    def _cell(self, step: int) -> tuple[int, int]:
        """The column, counted over all groups, and its first row that ``step`` reads."""
        rows_per_group = self.unit_windows * self.group_batches
        group = self.schedule.position(step) // rows_per_group
        runs: list[tuple[int, int]] = []
        first_step = 0
        phase_start = 0  # in rows; a multiple of the phase's bag size, as are the ends of a group
        for phase in self.schedule.phases:
            phase_stop = phase_start + phase.steps * phase.bag_size
            low = max(phase_start, group * rows_per_group)
            high = min(phase_stop, (group + 1) * rows_per_group)
            if low < high:
                if not runs:
                    first_step = phase.start + (low - phase_start) // phase.bag_size
                runs.append((phase.bag_size, (high - low) // phase.bag_size))
            phase_start = phase_stop
        column, row = _cells(tuple(runs), self.group_batches)[step - first_step]
        return group * self.group_batches + column, row

    def _too_short(self) -> str:
        ways = []
        multiple = math.lcm(*(phase.bag_size for phase in self.schedule.phases))
        unit_windows = self.tokens // self.latent_length // multiple * multiple
        if unit_windows >= 1:
            ways.append(f"set data.unit_windows to {unit_windows} or a smaller multiple of {multiple}")
        if self.tokens >= self.unit_windows:
            ways.append(f"set data.latent_length to at most {self.tokens // self.unit_windows}")
        ways.append("prepare more text")
        return (
            f"the corpus has {self.tokens} tokens, but a unit takes {self.unit_windows * self.latent_length} "
            f"(data.unit_windows={self.unit_windows} times data.latent_length={self.latent_length}): "
            f"{_either(ways)}"
        )


def order_faults(schedule: PhaseSchedule, unit_windows: int) -> list[str]:
    """Every reason why these phases cannot read units of ``unit_windows``, with values that would work."""
    if unit_windows < 1:
        return [f"data.unit_windows={unit_windows} must be at least 1 (the default is {UNIT_WINDOWS})"]
    faults = []
    bag_sizes = [phase.bag_size for phase in schedule.phases]
    for previous, bag_size in zip([None, *bag_sizes], bag_sizes, strict=False):
        if unit_windows % bag_size:
            ways = [f"set data.unit_windows to a multiple of {bag_size}"]
            if divisors := _divisors(unit_windows)[1:]:
                ways.insert(0, f"use {_one_of(divisors)}")
            faults.append(f"bag size {bag_size} does not divide data.unit_windows={unit_windows}: {_either(ways)}")
        if previous is not None and previous % bag_size:
            ways = []
            if divisors := [d for d in _divisors(math.gcd(previous, unit_windows))[1:] if d < previous]:
                ways.append(f"use {_one_of(divisors)}")
            if multiples := [d for d in _divisors(unit_windows) if d > bag_size and d % bag_size == 0]:
                ways.append(f"use {_one_of(multiples)} before it")
            ways.append("leave out one of the two stages")
            faults.append(
                f"bag size {bag_size} does not divide {previous}, the bag size of the stage before it: {_either(ways)}"
            )
    return faults


def batch_faults(global_batch_size: int, world_size: int, accumulation: int) -> list[str]:
    """Every reason why a global batch cannot be cut into micro-batches, with the values that would work."""
    values = {
        "data.global_batch_size": global_batch_size,
        "the number of processes": world_size,
        "trainer.accumulate_grad_batches": accumulation,
    }
    if faults := [f"{name}={value} must be at least 1" for name, value in values.items() if value < 1]:
        return faults
    parts = world_size * accumulation
    if global_batch_size % parts == 0:
        return []
    below = global_batch_size // parts * parts
    sizes = [size for size in (below, below + parts) if size]
    ways = [f"set data.global_batch_size to {_either([str(size) for size in sizes])}"]
    if global_batch_size % world_size == 0:
        ways.append(f"set trainer.accumulate_grad_batches to {_one_of(_divisors(global_batch_size // world_size))}")
    elif global_batch_size % accumulation == 0:
        ways.append(f"use {_one_of(_divisors(global_batch_size // accumulation))} processes")
    return [
        f"data.global_batch_size={global_batch_size} is not a multiple of {parts} "
        f"({world_size} processes times trainer.accumulate_grad_batches={accumulation}): {_either(ways)}"
    ]


def shard(batch: Sequence[Window], *, accumulation: int, world_size: int, rank: int) -> list[list[Window]]:
    """The micro-batches of one process. Those of all processes, micro-batch by micro-batch, are the batch.

    Raises:
        UserError: if the batch does not divide.
    """
    if faults := batch_faults(len(batch), world_size, accumulation):
        raise UserError(faults)
    assert 0 <= rank < world_size
    size = len(batch) // (world_size * accumulation)
    starts = ((micro * world_size + rank) * size for micro in range(accumulation))
    return [list(batch[start : start + size]) for start in starts]


def held_out(
    tokens: int, latent_length: int, *, batch_size: int, world_size: int = 1, rank: int = 0
) -> list[list[HeldOutWindow]]:
    """The batches of plain windows on which one process evaluates.

    Over all processes every whole window counts exactly once. Every process gets the same number of full
    batches, because processes that share a sharded model compute together or hang: where the text runs out,
    its last window is repeated and does not count.

    Raises:
        UserError: if the text is shorter than one window.
    """
    assert batch_size >= 1 and 0 <= rank < world_size
    windows = tokens // latent_length
    if windows < 1:
        raise UserError(
            f"the held-out text has {tokens} tokens, but one window takes {latent_length}: "
            "shorten data.latent_length or hold out more text"
        )
    batches = -(-windows // (batch_size * world_size))
    return [
        [
            HeldOutWindow(Window(min(index, windows - 1) * latent_length, 1), index < windows)
            for index in range(first, first + batch_size)
        ]
        for first in ((batch * world_size + rank) * batch_size for batch in range(batches))
    ]


class Permutation:
    """A random-looking bijection of ``range(size)``, fixed by ``keys``, in constant memory.

    A Feistel network over pairs (left, right) with moduli of about the square root of ``size``; a result
    outside the range is fed in again until it falls inside (cycle walking), which keeps the map a bijection.
    There are fewer than ``size + sqrt(size) + 1`` pairs, so it hardly ever walks. See Black and Rogaway,
    "Ciphers with arbitrary finite domains" (CT-RSA 2002).

    Each half of a pair is mixed ``ROUNDS`` times. Four mixings in all make a pseudorandom permutation of a
    large range (Luby and Rackoff, 1988), but a small range needs more: with 16, every ordering of 2 to 6
    units is equally likely to within what 24,000 seeds can tell (10 still showed at 5 units, 12 at 6).
    """

    ROUNDS = 8

    def __init__(self, size: int, *keys: int) -> None:
        assert size >= 1
        self.size = size
        self._lefts = math.isqrt(size - 1) + 1
        self._rights = -(-size // self._lefts)
        self._round_keys = [(_hash(*keys, 2 * i), _hash(*keys, 2 * i + 1)) for i in range(self.ROUNDS)]

    def __call__(self, place: int) -> int:
        """Where ``place`` goes."""
        assert 0 <= place < self.size
        while True:
            left, right = divmod(place, self._rights)
            for left_key, right_key in self._round_keys:
                left = (left + _splitmix64(left_key, right)) % self._lefts
                right = (right + _splitmix64(right_key, left)) % self._rights
            place = left * self._rights + right
            if place < self.size:
                return place


def _splitmix64(seed: int, index: int) -> int:
    """Output number ``index`` of the generator SplitMix64 (Steele, Lea and Flood, 2014)."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return z ^ (z >> 31)


def _hash(*keys: int) -> int:
    value = 0
    for key in keys:
        value = _splitmix64(value ^ key, 0)
    return value


# The caches only save time: a column's units are read unit_windows / bag_size times, a few columns in turn.


@lru_cache(maxsize=4)
def _permutation(size: int, *keys: int) -> Permutation:
    return Permutation(size, *keys)


@lru_cache(maxsize=4 * GROUP_BATCHES)
def _column_units(order: DataOrder, column: int) -> tuple[int, ...]:
    first = column * order.global_batch_size
    return tuple(order.unit(slot) for slot in range(first, first + order.global_batch_size))


@lru_cache(maxsize=16)
def _cells(runs: tuple[tuple[int, int], ...], columns: int) -> tuple[tuple[int, int], ...]:
    """The (column, first row) that each step of a group reads, for runs of (bag size, steps)."""
    # (rows read, column), so that the first is the least read, and the leftmost among equals
    heap = [(0, column) for column in range(columns)]
    cells = []
    for bag_size, steps in runs:
        for _ in range(steps):
            row, column = heap[0]
            heapq.heapreplace(heap, (row + bag_size, column))
            cells.append((column, row))
    return tuple(cells)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _one_of(numbers: Sequence[int], shown: int = 12) -> str:
    listed = ", ".join(map(str, numbers[:shown])) + (", ..." if len(numbers) > shown else "")
    return f"one of {listed}" if len(numbers) > 1 else listed


def _either(ways: Iterable[str]) -> str:
    *most, last = ways
    return f"{', '.join(most)} or {last}" if most else last
