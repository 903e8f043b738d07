"""The training log, one row a step where one is due."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from tst_lightning.callbacks.steps import tokens_so_far
from tst_lightning.errors import UserError
from tst_lightning.loggers import ResumableLogger

if TYPE_CHECKING:
    from tst_lightning.module import TSTModule


class StepMetrics(Callback):
    """Logs the training metrics of one optimiser step; :class:`~tst_lightning.TSTModule` brings it along.

    A row is written at every multiple of ``trainer.log_every_n_steps``, at the first and last step of the run
    and of every phase. ``step`` counts the optimiser steps done. ``train/superposition_loss`` or
    ``train/loss`` (next-token) is that step's mean over micro-batches and ranks, in nats a token; ``lr`` and
    ``grad_norm`` (before clipping) are that step's; ``tokens/data``, ``tokens/latent`` and, where the network's
    config can tell (:meth:`~tst_lightning.TransformerConfig.flops_per_token`), ``compute/flops`` count from step 0.
    A callback that has ``step_metrics(trainer, pl_module, totals)``, called with these counts once the loss and the
    norm have arrived from the device, adds what it returns to the row. Nothing is synchronised with the device on
    other steps.

    Every checkpoint, whichever callback saves it, carries the place of the logs
    (:class:`~tst_lightning.loggers.ResumableLogger`), and a resume takes them back there.
    """

    def __init__(self) -> None:
        self._step = 0
        self._places: dict[str, Any] = {}
        self._record: dict[str, Any] | None = None  # of the run as it began, and of its resumes

    def on_train_start(self, trainer: Trainer, pl_module: TSTModule) -> None:  # type: ignore[override]
        """Start from the restored step, with the logs as they were then, and let the loggers keep the run's record.

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
        here = pl_module.run_record()
        self._record = here if self._record is None else _resumed(self._record, here, trainer.global_step)
        for log in trainer.loggers:
            log.log_hyperparams(self._record)

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
        loss = trainer.strategy.reduce(pl_module.step_loss, reduce_op="mean")
        row = {
            f"train/{'loss' if phase.bag_size == 1 else 'superposition_loss'}": float(loss),  # waits for the device
            "lr": pl_module.step_lr,
            "grad_norm": float(pl_module.step_grad_norm),
            "phase/bag_size": phase.bag_size,
        }
        data, latent = tokens_so_far(trainer, schedule, batch)
        totals = {"tokens/data": data, "tokens/latent": latent}
        flops_per_token = pl_module.flops_per_token(batch.shape[1])
        if flops_per_token is not None:
            totals["compute/flops"] = flops_per_token * latent
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if hasattr(callback, "step_metrics"):
                row |= callback.step_metrics(trainer, pl_module, totals)
        pl_module.log_row({**row, **totals})

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Flush the logs and note their place."""
        if trainer.is_global_zero:
            checkpoint["logs"] = {name: logger.place() for name, logger in _resumable(trainer).items()}
            checkpoint["run"] = self._record

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Learn where the logs were; nothing is dropped until every other callback has accepted the checkpoint."""
        if trainer.state.fn == "fit" and trainer.is_global_zero:
            self._places = checkpoint.get("logs", {})
            self._record = checkpoint.get("run")


def _resumed(before: dict[str, Any], here: dict[str, Any], step: int) -> dict[str, Any]:
    """The run's record with one more resume, if it goes on somewhere else; how it began stays.

    A resume may lengthen the schedule, and change the global batch or skip text from its step on.
    """
    before = {**before, "schedule": here["schedule"], "data": here["data"]}
    resumes = before.get("resumes", [])
    place = {name: here[name] for name in ("version", "machine")}
    last = resumes[-1] if resumes else before
    if all(last[name] == value for name, value in place.items()):
        return before
    return {**before, "resumes": [*resumes, {"step": step, **place}]}


def _resumable(trainer: Trainer) -> dict[str, ResumableLogger]:
    """Loggers by class, numbered where there are several of one."""
    named: dict[str, ResumableLogger] = {}
    for logger in trainer.loggers:
        if isinstance(logger, ResumableLogger):
            kind = type(logger).__name__
            named[f"{kind}-{sum(name.startswith(f'{kind}-') for name in named)}"] = logger
    return named
