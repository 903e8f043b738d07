"""How many windows of each batch come from each source of a mixture: exact proportions, pure integer arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import ceil, floor


class Shares:
    """The sources of the places of one batch after the other, in exact proportions.

    Of every batch, source k gets ``batch_size * weight_k`` places, rounded up or down, so that over any number of
    batches from the first on it has had less than one place more or less than its exact share. What is left after
    rounding down is dealt out as a processor is dealt to periodic tasks by the algorithm PD2 (Srinivasan and
    Anderson, "Optimal rate-based scheduling on multiprocessors", STOC 2002), which keeps that bound for any weights.

    Args:
        weights: positive shares, exact; they need not add up to 1.
        batch_size: places of a batch.
    """

    def __init__(self, weights: Sequence[Fraction], batch_size: int) -> None:
        assert weights and all(weight > 0 for weight in weights) and batch_size >= 1
        exact = [batch_size * weight / sum(weights) for weight in weights]
        self._whole = [floor(share) for share in exact]
        self._seats = _Seats([share - whole for share, whole in zip(exact, self._whole, strict=True)])
        self._before = [(0,) * len(weights)]

    def before(self, batch: int) -> tuple[int, ...]:
        """Places that each source has in the batches before number ``batch``."""
        while len(self._before) <= batch:
            extra = self._seats.next()
            self._before.append(
                tuple(
                    count + whole + (source in extra)
                    for source, (count, whole) in enumerate(zip(self._before[-1], self._whole, strict=True))
                )
            )
        return self._before[batch]

    def places(self, batch: int) -> list[tuple[int, int]]:
        """For each place of batch number ``batch``, its source and which of the source's places of all time it is.

        The sources alternate as evenly as can be, so that the parts of a batch on several processes are alike.
        """
        first, stop = self.before(batch), self.before(batch + 1)
        found = []
        for source, (low, high) in enumerate(zip(first, stop, strict=True)):
            found += [((2 * i + 1) / (high - low), source, low + i) for i in range(high - low)]
        return [(source, number) for _, source, number in sorted(found)]


class _Seats:
    """Deals ``sum(shares)`` seats a round, at most one to each, so that nobody is ever a whole seat off its share."""

    def __init__(self, shares: Sequence[Fraction]) -> None:
        self._shares = {index: share for index, share in enumerate(shares) if share}
        self._seats = int(sum(self._shares.values()))
        assert self._seats == sum(self._shares.values())
        self._round = 0
        self._had = dict.fromkeys(self._shares, 0)

    def next(self) -> set[int]:
        """Who has a seat in the next round."""
        eligible = [index for index, had in self._had.items() if floor(had / self._shares[index]) <= self._round]
        chosen = sorted(eligible, key=self._urgency)[: self._seats]
        assert len(chosen) == self._seats
        for index in chosen:
            self._had[index] += 1
        self._round += 1
        return set(chosen)

    def _urgency(self, index: int) -> tuple[int, int, int]:
        """PD2's order: the earlier deadline; windows that overlap with the next; the longer chain of such windows."""
        share = self._shares[index]
        end = (self._had[index] + 1) / share
        deadline = ceil(end)
        overlaps = deadline - floor(end)
        chain = ceil(ceil(deadline * (1 - share)) / (1 - share)) if share >= Fraction(1, 2) else 0
        return deadline, -overlaps, -chain
