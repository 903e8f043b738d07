"""Read batches of a remote corpus before they are asked for, so that training does not wait for the network.

:class:`LookAhead` tells the dataset with every batch which later ones to begin with; :class:`ReadAhead` reads them
on an event loop in a thread of its own, in the main process or in a loader's worker alike. Which batches there are,
and their order, is untouched.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, NamedTuple, Protocol

from torch.utils.data import Dataset, Sampler

READS = 64  # in flight at once: at 50 ms each, 1,280 windows a second


class Request(NamedTuple):
    """What the dataset is asked for: the next batch that was begun with.

    Attributes:
        begin: batches to begin with now.
        afresh: whether an iteration begins, and what an earlier one has left is not wanted.
    """

    begin: tuple[Sequence[Any], ...]
    afresh: bool


class AsyncBatches(Protocol):
    """A dataset whose batches can be read together."""

    async def aread(self, batch: Sequence[Any], permits: asyncio.Semaphore) -> Any:
        """One batch; a permit is held during each read."""


class LookAhead(Sampler[Any]):
    """The batches of another sampler, begun with at least :data:`READS` windows before they are asked for.

    Args:
        batches: lists of windows; a loader deals them out to its workers in turn.
        num_workers: of the loader.
    """

    def __init__(self, batches: Any, num_workers: int) -> None:
        assert isinstance(batches, Sized)
        self.batches: Any = batches
        self.lanes = max(1, num_workers)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Request]:
        batches = iter(self.batches)
        rows: deque[list[Sequence[Any]]] = deque()  # a batch for each worker
        ahead = 0  # windows of the rows but the first
        afresh = True
        while True:
            begun = []
            while (not rows or ahead < self.lanes * READS) and (row := list(islice(batches, self.lanes))):
                ahead += sum(map(len, row)) if rows else 0
                rows.append(row)
                begun.append(row)
            if not rows:
                return
            for lane in range(len(rows.popleft())):
                yield Request(tuple(row[lane] for row in begun if lane < len(row)), afresh)
            ahead -= sum(map(len, rows[0])) if rows else 0
            afresh = False


class ReadAhead(Dataset[Any]):
    """Serves what :class:`LookAhead` asks for.

    A failed read is raised when its batch is asked for. The thread ends with this object; behind a fork a new one
    is started.

    Args:
        dataset: whose batches are read.
    """

    def __init__(self, dataset: AsyncBatches) -> None:
        self.dataset = dataset
        self._pending: deque[Future[Any]] = deque()
        self._loop: _Loop | None = None

    def __getitems__(self, request: Request) -> Any:
        """The next batch."""
        if self._loop is None or self._loop.process != os.getpid():
            self._loop = _Loop()
            weakref.finalize(self, self._loop.stop)
            self._pending.clear()
        if request.afresh:
            while self._pending:
                self._pending.popleft().cancel()
        for batch in request.begin:
            self._pending.append(self._loop.run(self.dataset, batch))
        return self._pending.popleft().result()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pending": deque(), "_loop": None}


class _Loop:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._loop = asyncio.new_event_loop()
        # where LitData has no native reads (Google's store, or behind a fork), it reads in these
        self._loop.set_default_executor(ThreadPoolExecutor(READS, thread_name_prefix="read-ahead"))
        self._permits = asyncio.Semaphore(READS)
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)
        self._thread.start()

    def run(self, dataset: AsyncBatches, batch: Sequence[Any]) -> Future[Any]:
        """Begin with a batch."""
        return asyncio.run_coroutine_threadsafe(dataset.aread(batch, self._permits), self._loop)

    def stop(self) -> None:
        """Give up what is under way and end the thread."""
        if self.process == os.getpid() and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            if threading.current_thread() is not self._thread:
                self._thread.join(10)

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._give_up(asyncio.all_tasks(self._loop)))
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def _give_up(self, tasks: set[asyncio.Task[Any]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
