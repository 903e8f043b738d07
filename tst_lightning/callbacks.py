"""What happens around the training step: the switch, the log, checkpoints, progress, the opening summary."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from tqdm import tqdm

from tst_lightning.errors import UserError
from tst_lightning.loggers import ResumableLogger
from tst_lightning.phases import PhaseSchedule
from tst_lightning.text import count

if TYPE_CHECKING:
    from tst_lightning.module import TSTModule


def tokens_so_far(trainer: Trainer, schedule: PhaseSchedule, batch: Tensor) -> tuple[int, int]:
    """Data and latent tokens of the steps done, over all ranks, told from the shape of one micro-batch."""
    B, L = batch.shape[:2]
    shape = {"global_batch_size": B * trainer.world_size * trainer.accumulate_grad_batches, "latent_length": L}
    step = trainer.global_step
    return schedule.data_tokens(step, **shape), schedule.latent_tokens(step, **shape)


def in_mid_step(trainer: Trainer, batch_idx: int) -> bool:
    """Whether more micro-batches of the optimiser step follow ``batch_idx``."""
    return (batch_idx + 1) % trainer.accumulate_grad_batches != 0


class PhaseSwitch(Callback):
    """Acts where one phase ends and the next begins; :class:`~tst_lightning.TSTModule` brings it along.

    It announces the switch, and stops the run loudly if a batch's shape disagrees with the schedule. It takes
    no schedule and keeps no state: both come from ``pl_module.schedule`` and ``trainer.global_step``.
    """

    def on_train_batch_start(
        self,
        trainer: Trainer,
        pl_module: TSTModule,  # type: ignore[override]
        batch: Tensor,
        batch_idx: int,
    ) -> None:
        """Hold the batch against the schedule."""
        phase = pl_module.schedule.at(trainer.global_step)
        expected = (phase.bag_size,) if phase.bag_size > 1 else ()
        if not isinstance(batch, Tensor) or batch.ndim < 2 or tuple(batch.shape[2:]) != expected:
            found = f"shape {tuple(batch.shape)}" if isinstance(batch, Tensor) else f"type {type(batch).__name__}"
            raise RuntimeError(
                f"step {trainer.global_step} belongs to the {phase.name} phase with bag size {phase.bag_size}, but its "
                f"batch has {found}: expected a tensor of tokens "
                f"{f'(B, L, {phase.bag_size})' if expected else '(B, L)'}. The data is not read by this run's schedule"
            )

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: TSTModule,  # type: ignore[override]
        outputs: Any,
        batch: Tensor,
        batch_idx: int,
    ) -> None:
        """Announce the next phase after the last step of this one; ask for the closing validation at the end."""
        step = trainer.global_step
        if in_mid_step(trainer, batch_idx):
            return
        if step in pl_module.schedule.boundaries:
            before, after = pl_module.schedule.at(step - 1), pl_module.schedule.at(step)
            _say(f"step {step}: the {before.name} phase ({before.reads}) ends, {after.name} ({after.reads}) begins")
        if step == pl_module.schedule.total_steps:
            trainer.should_stop = True  # makes Lightning validate here whatever val_check_interval is


class StepMetrics(Callback):
    """Logs the training metrics of one optimiser step; :class:`~tst_lightning.TSTModule` brings it along.

    A row is written at every multiple of ``trainer.log_every_n_steps``, at the first and last step of the run
    and of every phase. ``step`` counts the optimiser steps done. ``train/superposition_loss`` or
    ``train/loss`` (next-token) is that step's mean over micro-batches and ranks, in nats a token; ``lr`` and
    ``grad_norm`` (before clipping) are that step's; ``tokens/data`` and ``tokens/latent`` count from step 0.
    Nothing is synchronised with the device on other steps.

    Every checkpoint, whichever callback saves it, carries the place of the logs
    (:class:`~tst_lightning.loggers.ResumableLogger`), and a resume takes them back there.
    """

    def __init__(self) -> None:
        self._step = 0
        self._places: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start from the restored step, with the logs as they were then.

        Raises:
            UserError: if the run starts at step 0 where another one has logged.
        """
        self._step = trainer.global_step
        for name, logger in _resumable(trainer).items():
            if name in self._places:
                logger.rewind(self._places[name])
        self._places = {}
        if trainer.global_step == 0 and trainer.is_global_zero:
            used = [str(logger.log_dir) for logger in _resumable(trainer).values() if logger.holds_a_run()]
            if used:
                raise UserError(
                    f"{used[0]} already holds the log of a run: go on with it by ckpt_path, or give the loggers "
                    "another directory"
                )

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: TSTModule,  # type: ignore[override]
        outputs: Any,
        batch: Tensor,
        batch_idx: int,
    ) -> None:
        """Write the row where one is due."""
        step = trainer.global_step
        if step == self._step:
            return
        self._step = step
        schedule = pl_module.schedule
        phase = schedule.at(step - 1)
        log_every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if (not log_every or step % log_every) and step not in (phase.start + 1, phase.stop):
            return
        data, latent = tokens_so_far(trainer, schedule, batch)
        pl_module.log_row(
            {
                f"train/{'loss' if phase.bag_size == 1 else 'superposition_loss'}": trainer.strategy.reduce(
                    pl_module.step_loss, reduce_op="mean"
                ),
                "lr": pl_module.step_lr,
                "grad_norm": pl_module.step_grad_norm,
                "tokens/data": data,
                "tokens/latent": latent,
                "phase/bag_size": phase.bag_size,
            }
        )

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Flush the logs and note their place."""
        if trainer.is_global_zero:
            checkpoint["logs"] = {name: logger.place() for name, logger in _resumable(trainer).items()}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Learn where the logs were; nothing is dropped until every other callback has accepted the checkpoint."""
        if trainer.state.fn == "fit" and trainer.is_global_zero:
            self._places = checkpoint.get("logs", {})


def _resumable(trainer: Trainer) -> dict[str, ResumableLogger]:
    """Loggers by class, numbered where there are several of one."""
    named: dict[str, ResumableLogger] = {}
    for logger in trainer.loggers:
        if isinstance(logger, ResumableLogger):
            kind = type(logger).__name__
            named[f"{kind}-{sum(name.startswith(f'{kind}-') for name in named)}"] = logger
    return named


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


def list_checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints of :class:`StepCheckpoint` in ``folder``, oldest step first."""
    found = [(int(m[1]), p) for p in folder.glob("step-*.ckpt") if (m := re.fullmatch(r"step-(\d+)\.ckpt", p.name))]
    return [path for _, path in sorted(found)]


def _remove(path: Path) -> None:
    """A checkpoint is a file, or a directory when it is sharded."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()


class StepProgress(ProgressBar):
    """A progress bar in optimiser steps with the phase and both token counts; plain lines off a terminal."""

    REFRESH_SECONDS = 0.5
    PLAIN_LINES = 20
    EARLY_LINE = 10  # steps, so that nobody waits for a sign of life

    def __init__(self) -> None:
        super().__init__()
        self._bar: tqdm[Any] | None = None
        self._enabled = True
        self._refreshed = self._started = 0.0
        self._first_step = 0

    def disable(self) -> None:
        """Lightning calls this off rank 0."""
        self._enabled = False

    def enable(self) -> None:
        """The inverse of :meth:`disable`."""
        self._enabled = True

    def on_train_start(self, trainer: Trainer, pl_module: TSTModule) -> None:  # type: ignore[override]
        """Open the bar at the restored step."""
        self._first_step, self._started = trainer.global_step, time.monotonic()
        if self._enabled and sys.stderr.isatty():
            self._bar = tqdm(
                total=pl_module.schedule.total_steps,
                initial=trainer.global_step,
                bar_format="{desc}|{bar}| {n_fmt}/{total_fmt}, {remaining} left{postfix}",  # fits 80 columns
                dynamic_ncols=True,
            )

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: TSTModule,  # type: ignore[override]
        outputs: Any,
        batch: Tensor,
        batch_idx: int,
    ) -> None:
        """Show where the run is, at most twice a second."""
        if not self._enabled or in_mid_step(trainer, batch_idx):
            return
        step, schedule = trainer.global_step, pl_module.schedule
        if self._bar is not None:
            due = time.monotonic() - self._refreshed > self.REFRESH_SECONDS
        else:
            early = step == self._first_step + self.EARLY_LINE
            due = early or step % max(1, schedule.total_steps // self.PLAIN_LINES) == 0
        if not (due or step == schedule.total_steps):
            return
        self._refreshed = time.monotonic()
        phase = schedule.at(step - 1)
        loss = f"loss {float(pl_module.step_loss):.3f}"
        data, latent = map(count, tokens_so_far(trainer, schedule, batch))
        if self._bar is None:
            rate = (step - self._first_step) / (time.monotonic() - self._started)
            _say(
                f"step {step} of {schedule.total_steps}: {phase.name} ({phase.reads}), {loss}, "
                f"{data} data and {latent} latent tokens, {rate:.3g} steps/s, "
                f"{tqdm.format_interval((schedule.total_steps - step) / rate)} left"
            )
        else:
            self._bar.set_description_str(f"{phase.name} s={phase.bag_size}", refresh=False)
            self._bar.set_postfix_str(f"{loss} data {data} latent {latent}", refresh=False)
            self._bar.update(step - self._bar.n)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """One line with the held-out loss."""
        if self._enabled and not trainer.sanity_checking and "val/loss" in trainer.callback_metrics:
            loss, perplexity = (float(trainer.callback_metrics[f"val/{name}"]) for name in ("loss", "perplexity"))
            step = f"step {trainer.global_step}: " if trainer.state.fn == "fit" else ""
            _say(f"{step}held-out loss {loss:.4f} nats a token, perplexity {perplexity:.2f}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the bar."""
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close the bar, so that the error stands on a line of its own."""
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class RunSummary(Callback):
    """Opens the run with what is about to happen: parameters, phases, corpus, where the results go."""

    @rank_zero_only
    def on_train_start(self, trainer: Trainer, pl_module: TSTModule) -> None:  # type: ignore[override]
        """Print the summary."""
        parameters = sum(p.numel() for p in pl_module.parameters())
        lines = [
            f"network        {type(pl_module.network).__name__}, {count(parameters)} parameters ({parameters:,})",
            f"precision      {trainer.precision}, {trainer.world_size} process(es), "
            f"{trainer.accumulate_grad_batches} micro-batch(es) a step, torch {torch.__version__}",
        ]
        describe = getattr(trainer.datamodule, "describe", None)  # type: ignore[attr-defined]
        if describe is not None:
            lines += describe(pl_module.schedule, vocab_size=pl_module.vocab_size)
        lines.append(f"results        {trainer.default_root_dir}")
        if trainer.global_step:
            lines.append(f"resuming       at step {trainer.global_step} of {pl_module.schedule.total_steps}")
        for line in lines:
            _say(line)


@rank_zero_only
def _say(line: str) -> None:
    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()
