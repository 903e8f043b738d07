"""Whole-step checkpoints that a killed run goes on from exactly."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from tst_lightning.callbacks.steps import in_mid_step
from tst_lightning.checkpoints import list_checkpoints
from tst_lightning.errors import UserError
from tst_lightning.phases import PhaseSchedule


class StepCheckpoint(Checkpoint):
    """Saves whole-step checkpoints that a killed run goes on from exactly.

    One is due every ``every_n_steps`` optimiser steps, at every switch and at the end; where a validation
    follows the same step it is saved after it, so that no validation is missing or doubled on a resume.
    Files appear under their final name only when whole. The newest ``keep`` by step number stay.

    Args:
        every_n_steps: optimiser steps between checkpoints.
        keep: how many of the newest to keep; -1 for all.
        directory: where to; ``checkpoints`` in the run's directory by default.

    Raises:
        UserError: for counts that make no sense.
    """

    def __init__(self, every_n_steps: int = 1000, keep: int = 2, directory: str | None = None) -> None:
        super().__init__()
        faults = []
        if every_n_steps < 1:
            faults.append(f"checkpoint.every_n_steps={every_n_steps} must be at least 1")
        if keep < 1 and keep != -1:
            faults.append(f"checkpoint.keep={keep} must be at least 1, or -1 to keep all")
        if faults:
            raise UserError(faults)
        self.every_n_steps = every_n_steps
        self.keep = keep
        self.directory = directory
        self._last_saved = -1

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let whole files be written straight to where they belong."""
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:  # another one was chosen by somebody
            trainer.strategy.checkpoint_io = _DirectIO()

    def folder(self, trainer: Trainer) -> Path:
        """Where this run's checkpoints are."""
        return Path(self.directory) if self.directory else Path(trainer.default_root_dir) / "checkpoints"

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The step that was resumed from is saved already.

        Raises:
            UserError: if the run starts at step 0 where another one left checkpoints.
        """
        self._last_saved = trainer.global_step
        if trainer.global_step == 0:
            faults = checkpoint_folder_faults(self.folder(trainer), None)
            if faults:
                raise UserError(faults)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save after the step unless a validation follows it."""
        if in_mid_step(trainer, batch_idx):
            return
        loop = trainer.fit_loop
        # no public question for it as of Lightning 2.6.6
        if self._due(trainer) and not loop.epoch_loop._should_check_val_fx(loop._data_fetcher):  # type: ignore[arg-type]
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save after the validation that followed the step."""
        fitting = trainer.state.fn == "fit" and not trainer.sanity_checking
        if fitting and not in_mid_step(trainer, trainer.fit_loop.batch_idx) and self._due(trainer):
            self._save(trainer)

    def _due(self, trainer: Trainer) -> bool:
        step = trainer.global_step
        schedule: PhaseSchedule = trainer.lightning_module.schedule  # type: ignore[assignment]
        return step > self._last_saved and (
            step % self.every_n_steps == 0
            or step in schedule.boundaries
            or step == schedule.total_steps
            or trainer.should_stop  # by max_time or early stopping
        )

    def _save(self, trainer: Trainer) -> None:
        step = self._last_saved = trainer.global_step
        folder = self.folder(trainer)
        path = folder / f"step-{step:09d}.ckpt"
        temporary = folder / f"{path.name}.tmp"
        if trainer.is_global_zero and temporary.exists():  # from a run that was killed while it saved
            _remove(temporary)
        try:
            trainer.save_checkpoint(temporary)
        except BaseException:  # a full disk, say: what was written would only fill it
            if trainer.is_global_zero and temporary.exists():
                _remove(temporary)
            raise
        if trainer.is_global_zero:
            if path.exists():
                _remove(path)
            os.replace(temporary, path)
            if self.keep > 0:
                for old in list_checkpoints(folder)[: -self.keep]:
                    _remove(old)
        trainer.strategy.barrier("StepCheckpoint")

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Refuse to go back where later checkpoints would be left without their logs.

        Raises:
            UserError: naming them.
        """
        if trainer.state.fn == "fit":
            faults = checkpoint_folder_faults(self.folder(trainer), trainer.ckpt_path)
            if faults:
                raise UserError(faults)


class _DirectIO(TorchCheckpointIO):
    """Saves without a copy in memory and another in the system's temporary folder, as Lightning 2.6.6 makes.

    That a file is whole when it has its name is StepCheckpoint's doing.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        assert storage_options is None
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        torch.save(checkpoint, path)


def checkpoint_folder_faults(folder: Path, ckpt_path: str | os.PathLike[str] | None) -> list[str]:
    """Why a run that keeps its checkpoints in ``folder`` must not go on from ``ckpt_path`` (None: start).

    A resume takes the run's logs back to its checkpoint, so later checkpoints would be left without theirs.
    """
    others = list_checkpoints(folder)
    if ckpt_path is not None:
        resolved = [path.resolve() for path in others]
        if Path(ckpt_path).resolve() in resolved:
            others = others[resolved.index(Path(ckpt_path).resolve()) + 1 :]
    if not others:
        return []
    listed = ", ".join(path.name for path in others)
    found = f"{folder} already holds a run ({listed})"
    if ckpt_path is not None:
        found = f"{folder} holds {listed} beside {ckpt_path}, from a run that has gone further or from another one"
    return [
        f"{found}: go on with that run by --ckpt_path last, choose another --trainer.default_root_dir, or move these "
        "checkpoints away"
    ]


def _remove(path: Path) -> None:
    """A checkpoint is a file, or a directory when it is sharded."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()
