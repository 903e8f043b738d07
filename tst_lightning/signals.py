"""SIGINT and SIGTERM on the command line: the process ends at once, unless a run takes the first one. Loads nothing."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
LAUNCHER = "TST_LIGHTNING_LAUNCHER"  # environment variable: the process that has started the other ranks
# `timeout`, torchrun and terminals deliver one request to stop twice
SAME_REQUEST_SECONDS = 1.0


class SignalWatch:
    """Within its context SIGINT and SIGTERM end the process at once, with status 128 + signal.

    A run that has something to save sets ``polite``: then the first signal is left to the handler of
    :class:`~tst_lightning.GracefulStop`, and only a second one, a second later or more, ends the process.

    A thread does it, because Python runs no handler while its main thread is inside a collective or an import.
    """

    def __init__(self) -> None:
        self.polite = False
        self.before_exit: list[Callable[[], Any]] = []
        self._main = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> SignalWatch:
        if self._main:
            self._receiver, self._sender = socket.socketpair()
            self._sender.setblocking(False)
            self._handlers = {signum: signal.signal(signum, _noted) for signum in SIGNALS}
            self._wakeup_fd = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
            # a forked loader process has the handlers too, and must not speak for this one
            self._pid = os.getpid()
            os.register_at_fork(after_in_child=self._silence)
            threading.Thread(target=self._watch, name="signal-watch", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._main:
            signal.set_wakeup_fd(self._wakeup_fd)
            for signum, handler in self._handlers.items():
                signal.signal(signum, handler)
            self._main = False
            self._sender.close()  # ends the thread

    def _silence(self) -> None:
        if self._main:
            signal.set_wakeup_fd(-1)

    def _watch(self) -> None:
        first: float | None = None
        while received := self._receiver.recv(1):
            signum, now = received[0], time.monotonic()
            if signum not in SIGNALS or (first is not None and now - first < SAME_REQUEST_SECONDS):
                continue
            if first is None and self.polite:
                first = now
                continue
            self._end(signum)
        self._receiver.close()

    def _end(self, signum: int) -> None:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            with suppress(OSError):
                os.write(2, f"\nended at once by {signal.Signals(signum).name}\n".encode())
        parent = os.getppid()
        if os.environ.get(LAUNCHER) == str(parent):  # the other ranks would wait for this one
            os.kill(parent, signum)
        for action in self.before_exit:
            with suppress(OSError):
                action()
        os._exit(128 + signum)


def _noted(signum: int, frame: FrameType | None) -> None:
    """The thread acts."""


def leave_signals_to_main_process(worker: int) -> None:
    """For a loader process: what a terminal or a scheduler sends to all processes must not end the readers first."""
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


def end_loader_processes() -> None:
    """At the end of the program, when multiprocessing asks them to by SIGTERM, which they leave to this process."""
    import multiprocessing

    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()
