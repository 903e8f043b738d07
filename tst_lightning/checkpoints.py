"""Which checkpoints a run has, and how one is read. Needs PyTorch but not Lightning."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch

from tst_lightning.errors import UserError

RECORD = "tst_lightning"  # the key of our own record in a checkpoint


def list_checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints of :class:`~tst_lightning.StepCheckpoint` in ``folder``, oldest step first."""
    found = [(int(m[1]), p) for p in folder.glob("step-*.ckpt") if (m := re.fullmatch(r"step-(\d+)\.ckpt", p.name))]
    return [path for _, path in sorted(found)]


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A TST run's checkpoint in one file; its tensors stay on the disk until they are used.

    Nothing that it may hold is executed.

    Raises:
        UserError: if it is no whole checkpoint, or not of a TST run.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch 2.14 raises many kinds for a damaged file
        raise UserError(
            f"{path} is not a whole checkpoint ({type(error).__name__}): take another one, such as the one before"
        ) from error
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get(RECORD), dict):
        raise UserError(f"{path} was not saved by a TST run: there is no schedule and no network's shape in it")
    return checkpoint
