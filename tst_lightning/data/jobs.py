"""Work in a process of its own: what it reads, and how it reports.

``litdata.optimize`` changes the process that calls it (start method, random seeds, signal handlers) and
returns normally when its worker was killed; tokenizers cannot be interrupted. So a command only watches
such a process: it reads one job from standard input, reports events as JSON lines on standard output, and
whatever a library prints goes to standard error. It ends when standard input does: its parent is gone then.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import IO, Any, TypeVar

from tst_lightning.errors import UserError

JobT = TypeVar("JobT")


@dataclass
class Reporter:
    """Writes events for the parent: phases, progress ten times a second, the result or the faults."""

    stream: IO[str]
    done: int = 0
    documents: int = 0
    tokens: int = 0
    _last: float = field(default=0.0)

    def event(self, **values: Any) -> None:
        """Write one event."""
        self.stream.write(json.dumps(values) + "\n")
        self.stream.flush()

    def phase(self, name: str, total: int) -> None:
        """Begin a phase of ``total`` bytes."""
        self.done = self.documents = self.tokens = 0
        self.event(event="phase", name=name, total=total)

    def advance(self, size: int = 0, *, documents: int = 0, tokens: int = 0) -> None:
        """Count progress."""
        self.done += size
        self.documents += documents
        self.tokens += tokens
        if time.monotonic() - self._last >= 0.1:
            self._last = time.monotonic()
            self.event(event="progress", done=self.done, documents=self.documents, tokens=self.tokens)


def serve(kind: Callable[..., JobT], work: Callable[[JobT, Reporter], dict[str, Any]]) -> None:
    """Do the job on standard input and exit: 0 with a result, 1 with faults."""
    job = kind(**json.loads(sys.stdin.buffer.readline()))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    report = Reporter(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)
    # a forked worker must not hold the parent's pipe open after this process was killed
    os.register_at_fork(after_in_child=lambda: os.close(report.stream.fileno()))
    try:
        report.event(event="result", **work(job, report))
    except UserError as error:
        report.event(event="faults", faults=error.faults)
        sys.exit(1)
    except BrokenProcessPool:
        report.event(event="failed", message="a worker process was ended by the system (was there too little memory?)")
        sys.exit(1)
    except OSError as error:  # a full disk or a damaged input, above all: no traceback helps there
        report.event(event="failed", message=str(error))
        sys.exit(1)


def _end_with_parent() -> None:
    # Not sys.stdin.read(): a thread that waits in it holds its lock, on which every forked worker would hang.
    while os.read(0, 1024):
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)
