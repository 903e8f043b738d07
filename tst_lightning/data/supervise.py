"""Watch the process that prepares a corpus: start it, show how far it is, end it. Standard library only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from types import FrameType
from typing import IO, Any

from tst_lightning.errors import UserError

_LINE_SECONDS = 10.0
_JOB = "import importlib, sys; sys.path[:] = sys.argv[2:]; importlib.import_module(sys.argv[1]).main()"


class PrepareError(RuntimeError):
    """The work failed for a reason that is not in the arguments.

    Attributes:
        left: what became of the work done so far.
        log: what the libraries printed.
    """

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.left = ""
        self.log = log

    def __str__(self) -> str:
        return f"{super().__str__()}: {self.left}" if self.left else super().__str__()


class Stopped(KeyboardInterrupt):
    """A signal asked the command to stop.

    Attributes:
        signal: its number.
        left: what became of the work done so far.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.signal = number
        self.left = ""


@contextmanager
def stoppable() -> Iterator[None]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into an exception; ignore later ones while cleaning up.

    Handlers that somebody else has set are left alone, and so is everything outside the main thread.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        for each in previous:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(number)

    previous: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            handler = signal.getsignal(number)
            if handler in (signal.SIG_DFL, signal.default_int_handler):
                previous[number] = handler
                signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def run_job(job: Any, log: IO[str], progress: Progress) -> dict[str, Any]:
    """Let another process do the job, and end it with everything it started, whatever happens here.

    Args:
        job: a dataclass; the module that defines it has a ``main`` that serves it
            (:func:`tst_lightning.data.jobs.serve`).
        log: a file for what libraries print; what it holds is lost.
        progress: shows the job's.

    Returns:
        What the job returns.

    Raises:
        UserError: of the job.
        PrepareError: if it failed in another way.
    """
    # A variable of a launcher must not make LitData think that it is one of several workers.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("DATA_OPTIMIZER_") and name not in ("WORLD_SIZE", "GLOBAL_RANK", "NNODES")
    }
    result: dict[str, Any] | None = None
    log.seek(0)
    log.truncate()
    process = subprocess.Popen(
        [sys.executable, "-c", _JOB, type(job).__module__, *(os.path.abspath(path) for path in sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        encoding="utf-8",
        env=environment,
        start_new_session=True,  # Ctrl-C comes here alone, and the group can be killed as one
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        with suppress(BrokenPipeError):  # it died: its exit status says more
            process.stdin.write(json.dumps(asdict(job)) + "\n")
            process.stdin.flush()
        result = _follow(process.stdout, progress)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # not reaped yet: the number is still its own
        process.wait()
        process.stdout.close()
        with suppress(BrokenPipeError):
            process.stdin.close()
        progress.close(finished=result is not None)
    log.seek(0)
    lines = log.read()
    if process.returncode < 0:
        name = signal.Signals(-process.returncode).name
        hint = " (was there too little memory?)" if name == "SIGKILL" else ""
        raise PrepareError(f"the process that prepares the corpus was ended by {name}{hint}")
    if process.returncode or result is None:
        raise PrepareError("preparing failed, see the lines above", lines)
    return result


def _follow(events: IO[str], progress: Progress) -> dict[str, Any] | None:
    """Show progress until the events end; return the result, if there was one."""
    result = None
    for line in events:
        event = json.loads(line)
        kind = event.pop("event")
        if kind == "phase":
            progress.phase(**event)
        elif kind == "progress":
            progress.update(**event)
        elif kind == "faults":
            raise UserError(event["faults"])
        elif kind == "failed":
            raise PrepareError(event["message"])
        else:
            assert kind == "result", kind
            result = event
    return result


class Progress:
    """A bar on a terminal, else a line now and then. Bytes of text are what is counted."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._bar: Any = None
        self._name = ""
        self._total = 0
        self._started = self._last = 0.0

    def phase(self, name: str, total: int) -> None:
        """End the phase before, and begin another of ``total`` bytes."""
        self.close()
        self._name, self._total = name, total
        self._started = self._last = time.monotonic()
        if not self._shown:
            return
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total or None, desc=name, unit="B", unit_scale=True, dynamic_ncols=True)
        else:
            sys.stderr.write(f"{name}: {total / 1e6:,.1f} MB\n" if total else f"{name}\n")

    def update(self, done: int, documents: int, tokens: int) -> None:
        """Show how many bytes, documents and tokens of the phase are done."""
        if not self._shown:
            return
        counts = [f"{documents:,} documents"] if documents else []
        counts += [f"{tokens:,} tokens"] if tokens else []
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join(counts), refresh=False)
            self._bar.update(done - self._bar.n)
        elif time.monotonic() - self._last >= _LINE_SECONDS:
            self._last = time.monotonic()
            share = f"{done / self._total:.0%}" if self._total else f"{done:,} bytes"
            sys.stderr.write(f"{self._name}: {', '.join([share, *counts])}\n")

    def close(self, *, finished: bool = True) -> None:
        """End the present phase."""
        if self._bar is not None:
            if finished and self._total:  # the last event of a phase may have been too early to be sent
                self._bar.update(self._total - self._bar.n)
            self._bar.close()
            self._bar = None
        elif self._shown and self._name and finished:
            sys.stderr.write(f"{self._name}: {time.monotonic() - self._started:.1f} s\n")
        self._name = ""
