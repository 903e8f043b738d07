"""Whole-step checkpoints that a killed run goes on from exactly."""

from __future__ import annotations

import os
from collections.abc import Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, Timer
from lightning.pytorch.strategies import FSDPStrategy
from torch import distributed

from tst_lightning.callbacks.ranks import let_ranks_end
from tst_lightning.callbacks.steps import in_mid_step
from tst_lightning.checkpoints import (
    VALIDATION_DUE,
    list_checkpoints,
    publish,
    remove,
    remove_unfinished,
    step_of,
)
from tst_lightning.errors import UserError
from tst_lightning.phases import PhaseSchedule
from tst_lightning.sharded import write_error, write_shards
from tst_lightning.strategies import saves_in_background, saves_shards


class StepCheckpoint(Checkpoint):
    """Saves whole-step checkpoints that a killed run goes on from exactly.

    One is due every ``every_n_steps`` optimiser steps, at every switch and at the end; where a validation
    follows the same step it is saved after it, so that no validation is missing or doubled on a resume.
    :class:`~tst_lightning.GracefulStop` asks for another when the run is stopped, which goes as soon as ``keep``
    later or earlier ones that were due are there.
    Under FSDP a checkpoint is a directory of the ranks' shards, which any number of ranks can go on from.
    Files appear under their final name only when they are whole and on the disk. The newest ``keep`` by step
    number stay. ``trainer.max_time`` counts anew in each job of a chain.

    Args:
        every_n_steps: optimiser steps between checkpoints.
        keep: how many of the newest to keep; -1 for all.
        directory: where to; ``checkpoints`` in the run's directory by default.
        asynchronous: whether FSDP2's shards are written while training goes on, from a copy in the host's memory; the
            next checkpoint waits for it. Those of one process, DDP and FSDP1 are written at once anyway.

    Raises:
        UserError: for counts that make no sense.
    """

    def __init__(
        self, every_n_steps: int = 1000, keep: int = 2, directory: str | None = None, asynchronous: bool = False
    ) -> None:
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
        self.asynchronous = asynchronous
        self._pending: _Pending | None = None
        self._group: Any = None
        self._last_saved = -1
        self._validation_due = False  # what the checkpoint being saved, or resumed from, says
        self._val_check_batch: int | float | None = None

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
        self._last_saved, self._pending = trainer.global_step, None
        if self.asynchronous and saves_in_background(trainer):
            self._group = distributed.new_group(backend="gloo")  # beside the training's own collectives
        if trainer.global_step == 0:
            faults = checkpoint_folder_faults(self.folder(trainer), None)
            if faults:
                raise UserError(faults)
        if trainer.is_global_zero:
            remove_unfinished(self.folder(trainer))
        if self._validation_due:
            self._last_saved = -1  # to be saved again when nothing is due any more
            self._val_check_batch, trainer.val_check_batch = trainer.val_check_batch, 1  # whatever the interval is now

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save after the step unless a validation follows it."""
        if self._pending is not None and trainer.is_global_zero and self._pending.is_written():
            self._publish(trainer, self._pending)
        if not in_mid_step(trainer, batch_idx) and self._due(trainer) and not validation_follows(trainer):
            self.save(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The validation that was due on a resume is here: the loops go on as ever."""
        self._validation_begins(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save after the validation that followed the step."""
        fitting = trainer.state.fn == "fit" and not trainer.sanity_checking
        if fitting and not in_mid_step(trainer, trainer.fit_loop.batch_idx) and self._due(trainer):
            self.save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Nothing is left half written."""
        self.finish(trainer)
        if self._group is not None:
            distributed.destroy_process_group(self._group)
            self._group = None

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Nothing keeps the loops going where there was nothing to validate on after all."""
        self._validation_begins(trainer)

    def _due(self, trainer: Trainer) -> bool:
        return trainer.global_step > self._last_saved and (
            self._regular(trainer.global_step, trainer) or trainer.should_stop  # by max_time or early stopping
        )

    def _regular(self, step: int, trainer: Trainer) -> bool:
        """Whether an uninterrupted run saves at ``step``."""
        schedule: PhaseSchedule = trainer.lightning_module.schedule  # type: ignore[assignment]
        return step % self.every_n_steps == 0 or step in schedule.boundaries or step == schedule.total_steps

    def save(self, trainer: Trainer, validation_due: bool = False) -> Path:
        """Save after the step that has just been done, on every rank at once, unless that is saved already.

        Args:
            trainer: in a fit, between two steps.
            validation_due: whether the validation that belongs after this step is still to come.

        Raises:
            OSError: if the disk is full, say, on the rank that writes, and SystemExit on the others; earlier
                checkpoints are as they were.
        """
        self.finish(trainer)
        step, folder = trainer.global_step, self.folder(trainer)
        path = folder / f"step-{step:09d}.ckpt"
        if step == self._last_saved:
            return path
        temporary = folder / f"{path.name}.tmp"
        if trainer.is_global_zero and temporary.exists():
            remove(temporary)
        due_before, self._validation_due = self._validation_due, validation_due
        pending = self._pending = _Pending(path, temporary)
        io = trainer.strategy.checkpoint_io
        if isinstance(io, _DirectIO):
            io.failures = pending.failures
        try:
            if saves_shards(trainer):
                pending.future = self._begin_shards(trainer, pending)
            else:
                trainer.save_checkpoint(temporary)
        except OSError as error:
            pending.failures.append(error)
        finally:
            self._validation_due = due_before
            if isinstance(io, _DirectIO):
                io.failures = None
        self._last_saved = step
        if pending.future is None:
            self.finish(trainer)
        return path

    def _begin_shards(self, trainer: Trainer, pending: _Pending) -> Future[Any] | None:
        """Write what is no tensor, and the tensors too unless they can be written while training goes on."""
        trainer.strategy.barrier()  # until rank 0 has made room
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        # what Lightning 2.6.6 itself would write, and reads
        state = {"model" if isinstance(trainer.strategy, FSDPStrategy) else "state_dict": checkpoint.pop("state_dict")}
        state |= {f"optimizer_{i}": value for i, value in enumerate(checkpoint.pop("optimizer_states"))}
        try:
            pending.temporary.mkdir(parents=True, exist_ok=True)
            if trainer.is_global_zero:
                torch.save(checkpoint, pending.temporary / "meta.pt")
        except (OSError, RuntimeError) as error:
            pending.failures.append(_disk_error(error))
        # even so, for the ranks write together
        return write_shards(state, pending.temporary, self._group, pending.failures)

    def finish(self, trainer: Trainer) -> None:
        """Wait until a checkpoint that is written while training goes on is whole; on every rank at once.

        Raises:
            OSError: as :meth:`save`.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        pending.wait()
        if trainer.is_global_zero:
            self._publish(trainer, pending)
            if pending.temporary.exists():  # what was written would only fill the disk
                remove(pending.temporary)
        # rank 0 writes; the others must not wait for it in vain
        failures = pending.failures
        reason = trainer.strategy.broadcast(failures[0].strerror or str(failures[0]) if failures else None)
        if reason is not None:
            self._last_saved = -1
            let_ranks_end()
            if not trainer.is_global_zero:
                raise SystemExit(1)  # rank 0 says why
            saved = list_checkpoints(self.folder(trainer))
            way_out = f"--ckpt_path last goes on from {saved[-1].name}" if saved else "no other was saved before"
            raise OSError(f"{pending.path} could not be saved ({reason}): make room; {way_out}") from next(
                iter(failures), None
            )

    def _publish(self, trainer: Trainer, pending: _Pending) -> None:
        """Give what is whole its name, on rank 0."""
        if pending.published or pending.failures:
            return
        try:
            publish(pending.temporary, pending.path)
            pending.published = True
            self._prune(trainer)
        except OSError as error:
            pending.failures.append(error)

    def _prune(self, trainer: Trainer) -> None:
        """Keep what an uninterrupted run would keep, and where that is fewer than ``keep``, the newest others."""
        if self.keep < 0:
            return
        checkpoints = list_checkpoints(self.folder(trainer))
        regular = [path for path in checkpoints if self._regular(step_of(path), trainer)]
        others = [path for path in checkpoints if path not in regular]
        kept = {checkpoints[-1], *(others + regular)[-self.keep :]}
        for path in checkpoints:
            if path not in kept:
                remove(path)

    # ------------------------------------------------------------------ what a checkpoint says

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Note whether a validation is still to come."""
        checkpoint[VALIDATION_DUE] = self._validation_due

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Refuse to go back where later checkpoints would be left without their logs; see to what is due.

        Raises:
            UserError: naming them.
        """
        if trainer.state.fn != "fit":
            return
        faults = checkpoint_folder_faults(self.folder(trainer), trainer.ckpt_path)
        if faults:
            raise UserError(faults)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Timer):  # Lightning 2.6.6 counts on: a chain of jobs would stop for ever
                checkpoint.get("callbacks", {}).pop(callback.state_key, None)
        self._validation_due = bool(checkpoint.get(VALIDATION_DUE)) and trainer.enable_validation
        if self._validation_due:
            _make_validation_due(checkpoint["loops"]["fit_loop"])
            schedule: PhaseSchedule = pl_module.schedule  # type: ignore[assignment]
            # else the loop would not even begin where only the closing validation is left
            trainer.fit_loop.epoch_loop.max_steps = schedule.total_steps + 1

    def _validation_begins(self, trainer: Trainer) -> None:
        if trainer.state.fn == "fit" and self._validation_due:
            self._validation_due = False
            schedule: PhaseSchedule = trainer.lightning_module.schedule  # type: ignore[assignment]
            trainer.fit_loop.epoch_loop.max_steps = schedule.total_steps
            trainer.val_check_batch = self._val_check_batch
            trainer.fit_loop.epoch_loop.val_loop.batch_progress.total.reset()  # no batch is half done any more


def validation_follows(trainer: Trainer) -> bool:
    """Whether Lightning will validate after the micro-batch that has just been done."""
    loop = trainer.fit_loop
    # no public question for it as of Lightning 2.6.6
    return loop.epoch_loop._should_check_val_fx(loop._data_fetcher)  # type: ignore[arg-type]


def _make_validation_due(fit_loop: dict[str, Any]) -> None:
    """Make Lightning's counters say that the step is done and the first batch of its validation has begun.

    Then Lightning 2.6.6 goes back to the validation before it trains on, and begins it anew.
    """
    for count in ("current", "total"):
        steps = fit_loop["epoch_loop.batch_progress"][count]
        steps["completed"] = steps["processed"]
        fit_loop["epoch_loop.val_loop.batch_progress"][count] |= {
            "ready": 1,
            "started": 1,
            "processed": 0,
            "completed": 0,
        }


class _Pending:
    """A checkpoint between the first byte and its name."""

    def __init__(self, path: Path, temporary: Path) -> None:
        self.path, self.temporary = path, temporary
        self.future: Future[Any] | None = None
        self.failures: list[OSError] = []
        self.published = False

    def is_written(self) -> bool:
        return self.future is not None and self.future.done() and self.future.exception() is None

    def wait(self) -> None:
        if self.future is not None and isinstance(failure := self.future.exception(), BaseException):
            self.failures.append(write_error(failure))


def _disk_error(error: OSError | RuntimeError) -> OSError:
    # torch 2.14 complains about its file's length behind the system's own word
    failure = error if isinstance(error, OSError) else error.__context__
    if not isinstance(failure, OSError):
        raise error
    return failure


class _DirectIO(TorchCheckpointIO):
    """Saves without a copy in memory and another in the system's temporary folder, as Lightning 2.6.6 makes.

    That a file is whole when it has its name is StepCheckpoint's doing. While ``failures`` is a list, what goes wrong
    with the disk is kept there, because the ranks that do not write wait for the one that does.
    """

    failures: list[OSError] | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        assert storage_options is None
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb") as file:
                torch.save(checkpoint, file)
        except (OSError, RuntimeError) as error:
            failure = _disk_error(error)
            if self.failures is None:
                raise failure from error
            self.failures.append(failure)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Nothing that a checkpoint may hold is ever executed."""
        return super().load_checkpoint(path, map_location or (lambda storage, _: storage), weights_only=True)


def checkpoint_folder_faults(
    folder: Path, ckpt_path: str | os.PathLike[str] | None, damaged: Collection[Path] = ()
) -> list[str]:
    """Why a run that keeps its checkpoints in ``folder`` must not go on from ``ckpt_path`` (None: start).

    Those that are ``damaged`` do not count: they will be set aside.

    A resume takes the run's logs back to its checkpoint, so later checkpoints would be left without theirs.
    """
    others = [path for path in list_checkpoints(folder) if path not in damaged]
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
