"""Tasks in worker processes: their results in order, their progress together, the same whatever their number."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from typing import Any

from tst_lightning.data.jobs import Reporter


class _NotWantedError(Exception):
    """Ends a task whose result nobody will ask for."""


class _Counters:
    """How far the workers are, and whether they are to end."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.values = context.Array("q", 3)  # input bytes, documents, tokens
        self.stop = context.Event()

    def add(self, *amounts: int) -> None:
        if self.stop.is_set():
            raise _NotWantedError
        with self.values.get_lock():
            values = self.values.get_obj()
            values[:] = [value + amount for value, amount in zip(values, amounts, strict=True)]

    def tell(self, report: Reporter) -> None:
        size, documents, tokens = self.values[:]
        report.advance(size - report.done, documents=documents - report.documents, tokens=tokens - report.tokens)


_counters: _Counters | None = None  # a worker's


def use_threads(number: int) -> None:
    """Say how many threads the tokenizers library has in this process; it asks when it first needs them."""
    os.environ["RAYON_NUM_THREADS"] = str(number)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if number > 1 else "false"


def in_parallel(
    function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], workers: int, report: Reporter
) -> Generator[Any, None, None]:
    """``function(*task, advance)`` of every task, in their order; not much more of them is begun than is asked for."""
    processes = min(workers, len(tasks))
    if processes <= 1:
        for task in tasks:
            yield function(*task, lambda *amounts: report.advance(amounts[0], documents=amounts[1], tokens=amounts[2]))
        return
    counters = _Counters()
    pool = ProcessPoolExecutor(
        processes,
        multiprocessing.get_context("spawn"),
        initializer=_begin_worker,
        initargs=(counters, max(1, workers // processes)),
    )
    try:
        futures: dict[int, Future[Any]] = {}
        for number in range(len(tasks)):
            for ahead in range(number, min(number + 2 * processes, len(tasks))):
                if ahead not in futures:
                    futures[ahead] = pool.submit(_call, function, tasks[ahead])
            while not futures[number].done():
                wait([futures[number]], timeout=0.1)
                counters.tell(report)
            yield futures.pop(number).result()
        counters.tell(report)
    finally:
        counters.stop.set()
        pool.shutdown(wait=False, cancel_futures=True)


def _begin_worker(counters: _Counters, threads: int) -> None:
    global _counters
    _counters = counters
    use_threads(threads)


def _call(function: Callable[..., Any], task: tuple[Any, ...]) -> Any:
    assert _counters is not None
    return function(*task, _counters.add)
