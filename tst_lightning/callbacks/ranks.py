"""How several ranks end together."""

from __future__ import annotations

import threading

from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver


def let_ranks_end() -> None:
    """Every rank is about to end with the same status: keep Lightning's launcher from killing rank 0 for it.

    As of Lightning 2.6.6 it does within five seconds of a rank's ending with another status than 0.
    """
    for thread in threading.enumerate():
        if isinstance(thread, _ChildProcessObserver):
            thread._child_processes = []
