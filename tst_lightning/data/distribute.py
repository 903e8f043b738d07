"""Cut global batches, and the held-out windows, over processes and micro-batches. Pure integer arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tst_lightning.data.order import Window, divisors
from tst_lightning.errors import UserError
from tst_lightning.text import either, one_of


class HeldOutWindow(NamedTuple):
    """A plain window of the held-out text, and whether it counts or only fills up the batch."""

    window: Window
    counts: bool


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
    ways = [f"set data.global_batch_size to {either([str(size) for size in sizes])}"]
    if global_batch_size % world_size == 0:
        ways.append(f"set trainer.accumulate_grad_batches to {one_of(divisors(global_batch_size // world_size))}")
    elif global_batch_size % accumulation == 0:
        ways.append(f"use {one_of(divisors(global_batch_size // accumulation))} processes")
    return [
        f"data.global_batch_size={global_batch_size} is not a multiple of {parts} "
        f"({world_size} processes times trainer.accumulate_grad_batches={accumulation}): {either(ways)}"
    ]


def shard(batch: Sequence[Window], *, accumulation: int, world_size: int, rank: int) -> list[list[Window]]:
    """The micro-batches of one process. Those of all processes, micro-batch by micro-batch, are the batch.

    Raises:
        UserError: if the batch does not divide.
    """
    size, rest = divmod(len(batch), world_size * accumulation)
    if rest:
        raise UserError(batch_faults(len(batch), world_size, accumulation))
    assert 0 <= rank < world_size
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
