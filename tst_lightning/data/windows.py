"""Serve the windows that :mod:`tst_lightning.data.order` asks for, from a LitData directory.

LitData stores the corpus and reads any stretch of it on request (``StreamingDataset.read_window``: memory-
mapped on local disks, by byte range on S3). Which stretch is asked for, the count of what was handed out and
resuming are ours, because LitData's own iteration depends on the numbers of workers and processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from litdata import StreamingDataset
from litdata.streaming import TemporalArrayLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from tst_lightning.data.order import DataOrder, HeldOutWindow, Window, batch_faults, held_out, shard
from tst_lightning.errors import UserError


class WindowDataset(Dataset[Tensor]):
    """Any window of a prepared corpus, on request.

    The directory is opened at the first read. The dataset can be forked (LitData opens the directory again in
    the child) and pickled (it is sent unopened).

    Args:
        directory: a LitData directory (a local path or a URL) of ``TemporalArrayLoader`` records
            ``{"tokens": uint16 or int32}``.
        tokens: length of the corpus.
        latent_length: bags a window (L).
        record_tokens: tokens a record, of all records but the last.

    Raises:
        UserError: at the first read, if the records are of other lengths.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        tokens: int,
        latent_length: int,
        record_tokens: int = 2**20,
    ) -> None:
        self.directory = os.fspath(directory)
        self.tokens = tokens
        self.latent_length = latent_length
        self.record_tokens = record_tokens
        self._source: StreamingDataset | None = None

    def __getitem__(self, window: Window) -> Tensor:
        """One window: (L, S) tokens as stored, or (L,) if its bag size is 1."""
        return self.__getitems__([window])[0]

    def __getitems__(self, windows: Sequence[Window]) -> Tensor:
        """Windows of one bag size: (B, L, S) tokens as stored, or (B, L) if the bag size is 1."""
        bag_size = windows[0].bag_size
        assert all(window.bag_size == bag_size for window in windows), "a batch has one bag size"
        length = bag_size * self.latent_length
        first = self._read(windows[0].start, length)
        batch = np.empty((len(windows), length), first.dtype)
        batch[0] = first
        for i, window in enumerate(windows[1:], start=1):
            batch[i] = self._read(window.start, length)
        tokens = torch.from_numpy(batch)
        return tokens if bag_size == 1 else tokens.view(len(windows), self.latent_length, bag_size)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_source": None}

    def _read(self, start: int, length: int) -> np.ndarray[Any, Any]:
        """The tokens ``[start, start + length)`` of the flat stream, stitched where they cross records."""
        stop = start + length
        assert 0 <= start < stop <= self.tokens, f"[{start}, {stop}) is not in [0, {self.tokens})"
        source = self._open()
        parts = []
        while start < stop:
            record, offset = divmod(start, self.record_tokens)
            frames = min(stop - start, self.record_tokens - offset)
            parts.append(source.read_window(record, offset, frames, ["tokens"])["tokens"])
            start += frames
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _open(self) -> StreamingDataset:
        if self._source is None:
            source = StreamingDataset(self.directory, item_loader=TemporalArrayLoader())
            # A record of another length would shift every later window without a sign.
            *whole, last = source.frame_counts
            if set(whole) - {self.record_tokens} or len(whole) * self.record_tokens + last != self.tokens:
                raise UserError(
                    f"{self.directory} holds {sum(whole) + last} tokens in {len(whole) + 1} records, not "
                    f"{self.tokens} tokens in records of {self.record_tokens}: prepare it again"
                )
            self._source = source
        return self._source


class MicroBatchSampler(Sampler[list[Window]]):
    """The micro-batches of one process from micro-batch ``start`` on, over all steps of the run."""

    def __init__(self, order: DataOrder, *, world_size: int, rank: int, accumulation: int) -> None:
        if faults := batch_faults(order.global_batch_size, world_size, accumulation):
            raise UserError(faults)
        self.order = order
        self.world_size = world_size
        self.rank = rank
        self.accumulation = accumulation
        self.start = 0

    def __len__(self) -> int:
        return self.order.schedule.total_steps * self.accumulation

    def __iter__(self) -> Iterator[list[Window]]:
        first_step, done = divmod(self.start, self.accumulation)
        for step in range(first_step, self.order.schedule.total_steps):
            micro_batches = shard(
                self.order.batch(step),
                accumulation=self.accumulation,
                world_size=self.world_size,
                rank=self.rank,
            )
            yield from micro_batches[done:]
            done = 0


class WindowLoader(DataLoader[Tensor]):
    """The training micro-batches of one process; resumes at any step, whatever the workers and processes.

    Yields (B, L, S) tokens in a phase with bag size S > 1 and (B, L) in recovery, in the corpus's dtype, with
    B = ``global_batch_size / (world_size * accumulation)``. Iterating again goes on where the last iteration
    stopped. The global random states are left alone.

    Args:
        dataset: the corpus.
        order: the windows of every step.
        world_size: processes that share a global batch.
        rank: this process among them.
        accumulation: micro-batches a process reads in one step.
        num_workers: reader processes. 0 or 1 is fastest: handing a batch over costs more than reading it.
        pin_memory: return page-locked tensors, for an asynchronous copy to the device.

    Raises:
        UserError: if the global batch does not divide over processes and micro-batches.
    """

    def __init__(
        self,
        dataset: WindowDataset,
        order: DataOrder,
        *,
        world_size: int = 1,
        rank: int = 0,
        accumulation: int = 1,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        assert (dataset.tokens, dataset.latent_length) == (order.tokens, order.latent_length)
        self.order = order
        self.accumulation = accumulation
        self._sampler = MicroBatchSampler(order, world_size=world_size, rank=rank, accumulation=accumulation)
        self._handed_out = 0  # micro-batches
        super().__init__(
            dataset,
            batch_sampler=self._sampler,
            num_workers=num_workers,
            pin_memory=pin_memory,
            collate_fn=_as_is,
            generator=torch.Generator(),  # a private one: each iteration draws a seed for the workers
        )

    def __len__(self) -> int:
        """Micro-batches in the whole run, wherever this loader starts.

        Lightning holds its own count of micro-batches against it, which goes on from a checkpoint.
        """
        return len(self._sampler)

    def __iter__(self) -> Iterator[Tensor]:  # type: ignore[override]  # a plain iterator is all that is used
        # Lazy, because Lightning also calls iter() before it restores the position. Counted here and not in
        # the sampler, which runs ahead of what is handed out, and before the yield, because the consumer
        # saves the state while it holds the batch.
        self._sampler.start = position = self._handed_out
        for micro_batch in super().__iter__():
            position += 1
            self._handed_out = position
            yield micro_batch

    def state_dict(self) -> dict[str, int]:
        """The whole optimiser steps handed out and what fixes the order; the same on every process."""
        return {"step": self._handed_out // self.accumulation, **self.order.identity}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on after the step that is stored in ``state``.

        Accumulation, processes and workers may differ from those that wrote it.

        Raises:
            UserError: naming every difference, if the state is of another order of data.
        """
        faults = [
            f"the checkpoint read the data with {name}={state.get(name, 'unknown')}, this run has "
            f"{name}={value}: restore the old value or start a new run"
            for name, value in self.order.identity.items()
            if state.get(name) != value
        ]
        step, total_steps = state["step"], self.order.schedule.total_steps
        if step > total_steps:
            faults.append(
                f"the checkpoint is at step {step}, behind the end of this run at {total_steps}: "
                "raise trainer.max_steps"
            )
        if faults:
            raise UserError(faults)
        self._handed_out = step * self.accumulation


class HeldOutDataset(Dataset[tuple[Tensor, Tensor]]):
    """Plain windows with the mark whether they count."""

    def __init__(self, windows: WindowDataset) -> None:
        self.windows = windows

    def __getitems__(self, batch: Sequence[HeldOutWindow]) -> tuple[Tensor, Tensor]:
        """(B, L) tokens as stored, and (B,) bool."""
        tokens_BL = self.windows.__getitems__([item.window for item in batch])
        return tokens_BL, torch.tensor([item.counts for item in batch])


def held_out_loader(
    dataset: WindowDataset,
    *,
    batch_size: int,
    world_size: int = 1,
    rank: int = 0,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> DataLoader[tuple[Tensor, Tensor]]:
    """The held-out batches of one process: (B, L) tokens as stored, and (B,) bool of which windows count.

    Over all processes every whole window counts exactly once; every process gets the same number of batches.

    Raises:
        UserError: if the text is shorter than one window.
    """
    return DataLoader(
        HeldOutDataset(dataset),
        batch_sampler=held_out(
            dataset.tokens, dataset.latent_length, batch_size=batch_size, world_size=world_size, rank=rank
        ),
        num_workers=num_workers,
        pin_memory=pin_memory,
        collate_fn=_as_is,
        generator=torch.Generator(),
    )


def _as_is(batch: Any) -> Any:
    """The datasets make whole batches; collating would take them apart."""
    return batch
