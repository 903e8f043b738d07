"""How several ranks end together."""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
import threading

from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from torch import distributed

EXIT_SECONDS = 20  # more than ranks that end together are apart


def let_ranks_end() -> None:
    """Every rank is about to end with the same status: keep Lightning's launcher from killing rank 0 for it.

    As of Lightning 2.6.6 it does within five seconds of a rank's ending with another status than 0.
    """
    for thread in threading.enumerate():
        if isinstance(thread, _ChildProcessObserver):
            thread._child_processes = []


def end_process_groups_at_exit() -> None:
    """Let the threads of the process groups end before the interpreter does, which else may abort (torch 2.14).

    As of Lightning 2.6.6 it sees to that with NCCL only.
    """
    if distributed.is_available() and distributed.is_initialized() and distributed.get_backend() != "nccl":
        atexit.unregister(_end_process_groups)
        atexit.register(_end_process_groups)


def _end_process_groups() -> None:
    if not distributed.is_initialized():
        return
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with open(os.devnull, "w") as nowhere:  # a rank that has failed may have left the others amid a collective
        faulthandler.dump_traceback_later(EXIT_SECONDS, exit=True, file=nowhere)
        distributed.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()
