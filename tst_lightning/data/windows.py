"""Serve the windows that :mod:`tst_lightning.data.order` asks for, from a LitData directory.

LitData stores the corpus and reads any stretch of it on request (``StreamingDataset.read_window``: memory-
mapped on local disks, by byte range on S3). Which stretch is asked for, the count of what was handed out and
resuming are ours, because LitData's own iteration depends on the numbers of workers and processes.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from litdata import StreamingDataset
from litdata.streaming import TemporalArrayLoader
from litdata.streaming.resolver import Dir
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from tst_lightning.data.distribute import HeldOutWindow, batch_faults, held_out, shard
from tst_lightning.data.order import DataOrder, Window
from tst_lightning.data.read_ahead import LookAhead, ReadAhead
from tst_lightning.data.stores import NoAnswer, StorePath, litdata_options, locate, store_errors
from tst_lightning.errors import UserError
from tst_lightning.signals import end_loader_processes, leave_signals_to_main_process

# Seconds between the tries of a remote read: an outage of five minutes ends no run. LitData's client (obstore 0.12)
# retries ten times of its own each time, which took 2 to 13 seconds.
WAITS: tuple[float | None, ...] = (1, 2, 4, 8, 15, 30, 60, 60, 60, None)

atexit.register(end_loader_processes)  # before multiprocessing, which was imported earlier, waits for them
_logger = logging.getLogger(__name__)
_FIELDS = ["tokens"]
_NO_ERRORS: AbstractContextManager[None] = nullcontext()  # of a store


class TokenStream:
    """The flat stream of one split of a prepared corpus: any stretch of it, on request.

    The directory is opened at the first read. A stream can be forked (LitData opens the directory again in the
    child) and pickled (it is sent unopened).

    Args:
        directory: a LitData directory (a local path or a URL) of ``TemporalArrayLoader`` records
            ``{"tokens": uint16 or int32}``.
        tokens: length of the stream.
        record_tokens: tokens a record, of all records but the last.

    Raises:
        UserError: at the first read, if the records are of other lengths.
        StoreError: at any read of a URL that fails, also after several tries.
    """

    def __init__(self, directory: str | os.PathLike[str], *, tokens: int, record_tokens: int = 2**20) -> None:
        self.directory = locate(directory)
        self.tokens = tokens
        self.record_tokens = record_tokens
        self._source: StreamingDataset | None = None
        self._files: list[str] = []  # of a remote directory, in which each record lies
        self._silent_until = 0.0

    def read(self, start: int, length: int) -> np.ndarray[Any, Any]:
        """The tokens ``[start, start + length)``, stitched where they cross records."""
        stop = start + length
        assert 0 <= start < stop <= self.tokens, f"[{start}, {stop}) is not in [0, {self.tokens})"
        source = self._open()
        record, offset = divmod(start, self.record_tokens)
        if not self._files and offset + length <= self.record_tokens:  # here, in one record: hardly slower than LitData
            tokens: np.ndarray[Any, Any] = source.read_window(record, offset, length, _FIELDS)["tokens"]
            return tokens
        parts = []
        for record, offset, frames in self._pieces(start, length):
            for wait in WAITS:
                try:
                    with self._errors(record):
                        parts.append(source.read_window(record, offset, frames, _FIELDS)["tokens"])
                    break
                except NoAnswer as error:
                    time.sleep(self._wait(wait, error))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    async def aread(self, start: int, length: int, permits: asyncio.Semaphore) -> np.ndarray[Any, Any]:
        """As :meth:`read`, beside other reads; a permit is held during each request."""
        assert 0 <= start < start + length <= self.tokens
        source = self._open()
        parts = []
        for record, offset, frames in self._pieces(start, length):
            async with permits:
                for wait in WAITS:
                    try:
                        with self._errors(record):
                            parts.append((await source.aread_window(record, offset, frames, _FIELDS))["tokens"])
                        break
                    except NoAnswer as error:
                        await asyncio.sleep(self._wait(wait, error))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _pieces(self, start: int, length: int) -> Iterator[tuple[int, int, int]]:
        """The records over which the stretch lies: record, first token in it, tokens."""
        stop = start + length
        while start < stop:
            record, offset = divmod(start, self.record_tokens)
            frames = min(stop - start, self.record_tokens - offset)
            yield record, offset, frames
            start += frames

    def _wait(self, seconds: float | None, error: NoAnswer) -> float:
        """How long to wait before the next try, with a word about it; raises the error if it was the last one."""
        if seconds is None:
            raise error
        if time.monotonic() >= self._silent_until:  # other reads have the same trouble
            self._silent_until = time.monotonic() + seconds
            _logger.warning("%s: trying again in %.3g s", error, seconds)
        return seconds

    def _errors(self, record: int) -> AbstractContextManager[None]:
        return store_errors(str(self.directory / self._files[record])) if self._files else _NO_ERRORS

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_source": None}

    def _open(self) -> StreamingDataset:
        if self._source is None:
            source, frames, self._files = _open(self.directory)
            # A record of another length would shift every later window without a sign.
            *whole, last = frames
            if set(whole) - {self.record_tokens} or len(whole) * self.record_tokens + last != self.tokens:
                raise UserError(
                    f"{self.directory} holds {sum(whole) + last} tokens in {len(whole) + 1} records, not "
                    f"{self.tokens} tokens in records of {self.record_tokens}: prepare it again"
                )
            self._source = source
        return self._source


def _open(directory: Path | StorePath) -> tuple[StreamingDataset, list[int], list[str]]:
    """LitData's dataset, the lengths of its records and, of a remote directory, the files that they lie in."""
    if isinstance(directory, Path):
        source = StreamingDataset(str(directory), item_loader=TemporalArrayLoader())
        return source, source.frame_counts, []
    # The index as it is now, not as LitData may have kept it from an earlier corpus of this name. Once it is read
    # nothing more is kept on disk: a window's bytes go straight into memory.
    with tempfile.TemporaryDirectory() as folder:
        index = (directory / "index.json").read_bytes()
        Path(folder, "index.json").write_bytes(index)
        files = [chunk["filename"] for chunk in json.loads(index)["chunks"] for _ in chunk["temporal_frames"]]
        source = StreamingDataset(
            Dir(folder, str(directory)),
            item_loader=TemporalArrayLoader(),
            storage_options=litdata_options(directory),
        )
        return source, source.frame_counts, files


class WindowDataset(Dataset[Tensor]):
    """Any window of the token streams of a mixture (or of the only one), on request.

    Args:
        streams: what ``Window.source`` counts; all of one dtype.
        latent_length: bags a window (L).
    """

    def __init__(self, streams: Sequence[TokenStream], latent_length: int) -> None:
        self.streams = tuple(streams)
        self.latent_length = latent_length
        self.remote = any(isinstance(stream.directory, StorePath) for stream in streams)

    def __getitem__(self, window: Window) -> Tensor:
        """One window: (L, S) tokens as stored, or (L,) if its bag size is 1."""
        return self.__getitems__([window])[0]

    def __getitems__(self, windows: Sequence[Window]) -> Tensor:
        """Windows of one bag size: (B, L, S) tokens as stored, or (B, L) if the bag size is 1."""
        length = self._length(windows)
        first = self._read(windows[0], length)
        batch = np.empty((len(windows), length), first.dtype)
        batch[0] = first
        for i, window in enumerate(windows[1:], start=1):
            batch[i] = self._read(window, length)
        return self._in_bags(batch)

    async def aread(self, windows: Sequence[Window], permits: asyncio.Semaphore) -> Tensor:
        """As :meth:`__getitems__`, with all reads under way at once."""
        length = self._length(windows)
        reads = [self.streams[window.source].aread(window.start, length, permits) for window in windows]
        return self._in_bags(np.stack(await asyncio.gather(*reads)))

    def _length(self, windows: Sequence[Window]) -> int:
        bag_size = windows[0].bag_size
        assert all(window.bag_size == bag_size for window in windows), "a batch has one bag size"
        return bag_size * self.latent_length

    def _in_bags(self, batch: np.ndarray[Any, Any]) -> Tensor:
        tokens, bag_size = torch.from_numpy(batch), batch.shape[1] // self.latent_length
        return tokens if bag_size == 1 else tokens.view(len(batch), self.latent_length, bag_size)

    def _read(self, window: Window, length: int) -> np.ndarray[Any, Any]:
        return self.streams[window.source].read(window.start, length)


class MicroBatchSampler(Sampler[list[Window]]):
    """The micro-batches of one process from micro-batch ``start`` on, over all steps of the run."""

    def __init__(self, order: DataOrder, *, world_size: int, rank: int, accumulation: int) -> None:
        _, size = order.batches.sizes[-1]  # those before are of steps that were done elsewhere
        if faults := batch_faults(size, world_size, accumulation):
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
    B = the global batch size over ``world_size * accumulation``. Iterating again goes on where the last iteration
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
        assert tuple(stream.tokens for stream in dataset.streams) == order.tokens
        assert dataset.latent_length == order.latent_length
        self.order = order
        self.accumulation = accumulation
        self._sampler = MicroBatchSampler(order, world_size=world_size, rank=rank, accumulation=accumulation)
        self._windows = dataset
        self._handed_out = 0  # micro-batches
        super().__init__(
            ReadAhead(dataset) if dataset.remote else dataset,
            batch_sampler=LookAhead(self._sampler, num_workers) if dataset.remote else self._sampler,
            num_workers=num_workers,
            pin_memory=pin_memory,
            collate_fn=_as_is,
            worker_init_fn=leave_signals_to_main_process,
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
        plain = not (self.num_workers or self.pin_memory or self._windows.remote)
        # without workers a DataLoader adds nothing but a third of the time that reading takes
        batches = map(self._windows.__getitems__, self._sampler) if plain else super().__iter__()
        for micro_batch in batches:
            position += 1
            self._handed_out = position
            yield micro_batch

    def state_dict(self) -> dict[str, Any]:
        """The whole optimiser steps handed out and what fixes the order; the same on every process."""
        return {"step": self._handed_out // self.accumulation, **self.order.identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
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

    async def aread(self, batch: Sequence[HeldOutWindow], permits: asyncio.Semaphore) -> tuple[Tensor, Tensor]:
        """As :meth:`__getitems__`, with all reads under way at once."""
        tokens_BL = await self.windows.aread([item.window for item in batch], permits)
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
    """The held-out batches of one process, of a single stream: (B, L) tokens, and (B,) bool of which windows count.

    Over all processes every whole window counts exactly once; every process gets the same number of batches.

    Raises:
        UserError: if the text is shorter than one window.
    """
    (stream,) = dataset.streams
    batches = held_out(stream.tokens, dataset.latent_length, batch_size=batch_size, world_size=world_size, rank=rank)
    windows = HeldOutDataset(dataset)
    return DataLoader(
        ReadAhead(windows) if dataset.remote else windows,
        batch_sampler=LookAhead(batches, num_workers) if dataset.remote else batches,
        num_workers=num_workers,
        pin_memory=pin_memory,
        collate_fn=_as_is,
        worker_init_fn=leave_signals_to_main_process,
        generator=torch.Generator(),
    )


def _as_is(batch: Any) -> Any:
    """The datasets make whole batches; collating would take them apart."""
    return batch
