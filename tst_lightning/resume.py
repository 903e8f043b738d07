"""What a run that goes on must share with its checkpoint, and where it begins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def differences(part: str, saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """A sentence for each setting of ``part`` that the checkpoint's run and this one do not share."""
    return [
        f"{part}.{key} was {saved.get(key)} in the checkpoint's run and is {here.get(key)} here: take "
        f"{saved.get(key)}, or start a new run"
        for key in sorted(saved.keys() | here.keys())
        if saved.get(key) != here.get(key)
    ]


def begin_at_step(checkpoint: dict[str, Any], step: int, accumulation: int) -> None:
    """Make Lightning's own counters and the loader's say that exactly ``step`` optimiser steps were done.

    Lightning 2.6.6 steps the optimiser when its count of micro-batches is a multiple of the accumulation, so
    the count must follow when the accumulation changes, and when a checkpoint was saved in mid-step.
    """
    fit_loop = checkpoint["loops"]["fit_loop"]
    for count in ("current", "total"):
        progress = fit_loop["epoch_loop.batch_progress"][count]
        open_batches = progress["processed"] - progress["completed"]  # 1 if saved as a batch ended, else 0
        for name in ("ready", "started", "processed", "completed"):
            progress[name] = step * accumulation
        progress["completed"] -= open_batches
    for state in fit_loop["state_dict"].get("combined_loader", []):
        if isinstance(state, dict) and "step" in state:
            state["step"] = step
