"""Which checkpoints a run has, which are whole, and how one is read. Needs PyTorch but not Lightning."""

from __future__ import annotations

import os
import re
import shutil
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import torch

from tst_lightning.errors import UserError
from tst_lightning.sharded import check_sharded

RECORD = "tst_lightning"  # the key of our own record in a checkpoint
# true in a checkpoint that was saved after a step whose validation is still to come
VALIDATION_DUE = "validation_due"


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of :class:`~tst_lightning.StepCheckpoint` in ``folder``, oldest step first."""
    found = [(step_of(path), path) for path in folder.glob("step-*.ckpt")]
    return [path for step, path in sorted(found) if step >= 0]


def step_of(path: Path) -> int:
    """The step in a checkpoint's name, or -1."""
    match = re.fullmatch(r"step-(\d+)\.ckpt", path.name)
    return int(match[1]) if match else -1


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A TST run's checkpoint; its tensors stay on the disk until they are used, those of a sharded one for good.

    Nothing that it may hold is executed.

    Raises:
        UserError: if it is no whole checkpoint, or not of a TST run.
    """
    path = Path(path)
    sharded = path.is_dir()  # Lightning keeps all but the tensors in a file of its own there
    try:
        if sharded and not (path / ".metadata").is_file():
            raise FileNotFoundError("no .metadata in the directory")
        checkpoint = torch.load(
            path / "meta.pt" if sharded else path, map_location="cpu", mmap=not sharded, weights_only=True
        )
    except Exception as error:  # torch 2.14 raises many kinds for a damaged file
        raise UserError(
            f"{path} is not a whole checkpoint ({type(error).__name__}): take another one, such as the one before"
        ) from error
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get(RECORD), dict):
        raise UserError(f"{path} was not saved by a TST run: there is no schedule and no network's shape in it")
    return checkpoint


def checkpoint_fault(path: Path) -> str | None:
    """Why a run cannot go on from ``path``: None if it can. Reads all of a file, as its checksums ask."""
    try:
        read_checkpoint(path)
        if path.is_dir():
            check_sharded(path)
        else:
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
            if damaged is not None:  # torch 2.14 does not look
                raise UserError(f"{path} is damaged: its part {damaged} does not have its checksum")
    except UserError as error:
        return str(error)
    except (OSError, zipfile.BadZipFile) as error:
        return f"{path} is damaged ({error})"
    return None


def newest_whole(checkpoints: Sequence[Path]) -> tuple[Path | None, dict[Path, str]]:
    """The last of ``checkpoints`` that a run can go on from, and the later ones with what is wrong with each.

    It only reads, so several processes that ask find the same.
    """
    damaged: dict[Path, str] = {}
    for path in reversed(checkpoints):
        fault = checkpoint_fault(path)
        if fault is None:
            return path, damaged
        damaged[path] = fault
    return None, damaged


def set_aside(path: Path) -> Path:
    """Give a damaged checkpoint a name under which it is no longer one; returns the new path."""
    names = (path.with_name(f"{path.name}.damaged{f'-{i}' if i else ''}") for i in count())
    aside = next(name for name in names if not name.exists())
    path.rename(aside)
    return aside


def remove_unfinished(folder: Path) -> None:
    """Remove what processes that were killed while they saved have left."""
    for path in folder.glob("step-*.ckpt.tmp"):
        remove(path)


def remove(path: Path) -> None:
    """A checkpoint is a file, or a directory when it is sharded."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def publish(temporary: Path, path: Path) -> None:
    """Give a finished checkpoint its name; a crash of the machine leaves either nothing of that name or all of it."""
    for file in [temporary] if temporary.is_file() else temporary.rglob("*"):
        if file.is_file():
            _sync(file)
    if path.is_dir():  # cannot be replaced in one go
        remove(path)
    os.replace(temporary, path)
    with suppress(OSError):  # some network file systems refuse it for a directory
        _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
