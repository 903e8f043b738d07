"""A run that is told to stop ends after a whole step, with a checkpoint that goes on exactly."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, Timer
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from torch import distributed

from tst_lightning.callbacks.checkpoint import StepCheckpoint, validation_follows
from tst_lightning.callbacks.ranks import let_ranks_end
from tst_lightning.callbacks.steps import in_mid_step, say
from tst_lightning.phases import PhaseSchedule
from tst_lightning.signals import SAME_REQUEST_SECONDS, SIGNALS, SignalWatch


class Stopped(SystemExit):
    """A run that a signal has ended between two steps; ``code`` is 128 + signal."""


class GracefulStop(Checkpoint):
    """Ends the run after SIGTERM or SIGINT, also to one rank of several, so that a resume goes on exactly.

    The step is finished, a checkpoint is saved by :class:`~tst_lightning.StepCheckpoint`, and :class:`Stopped` ends the
    program with status 143 or 130. A validation is not waited for: the resume runs the whole of it. A second signal,
    a second later or more, gets what it would have got without this callback. The former handlers come back
    when the run ends. On the command line this is so by default; elsewhere, give it beside a ``StepCheckpoint``.

    ``trainer.max_time`` ends a run in the same way, after a whole step and without a validation, but normally.

    All ranks stop after the same step: the signal is reduced over them on the CPU, from one step's end to the next's,
    so with several ranks one more step is done. Every rank must validate on the same number of batches.
    """

    watch: SignalWatch | None = None  # the command line's, which ends the process at once before and after the run

    def __init__(self) -> None:
        super().__init__()  # a Checkpoint, because Lightning calls those last, when the step's row is written
        self._signum = 0
        self._received = 0.0
        self._handlers: dict[signal.Signals, Any] = {}
        self._group: Any = None
        self._reduced = torch.zeros(1, dtype=torch.int32)
        self._work: Any = None
        self._message = ""

    def faults(self, trainer: Trainer, datamodule: Any) -> list[str]:
        """What is missing; the module asks before the fit starts."""
        if _saver(trainer) is None:
            return ["GracefulStop has nothing to save with: add a StepCheckpoint to the callbacks"]
        return []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Keep Lightning's own handlers away: they hang where one rank of two gets the signal (2.6.6)."""
        if stage == "fit":
            trainer._signal_connector = _OtherSignals(trainer)
            # it would ask in every micro-batch, and wait for the device, whether they had one
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """From here on there is something to save."""
        self._signum, self._work, self._message = 0, None, ""
        if trainer.world_size > 1 and distributed.is_available() and distributed.is_initialized():
            self._group = distributed.new_group(backend="gloo")
        if threading.current_thread() is threading.main_thread():
            self._handlers = {signum: signal.signal(signum, self._note) for signum in SIGNALS}
        if self.watch is not None:
            self.watch.polite = True

    def _note(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._signum:
            self._signum, self._received = signum, now
        elif now - self._received >= SAME_REQUEST_SECONDS and self.watch is None:
            self._restore()
            signal.raise_signal(signum)

    def _agreed(self) -> int:
        """The signal that any rank had received at the last of these questions, or 0; the same on every rank."""
        if self._group is None:
            return self._signum
        if self._work is not None:
            self._work.wait()
            self._work = None
            if signum := int(self._reduced):
                return signum
        self._reduced = torch.tensor([self._signum], dtype=torch.int32)
        self._work = distributed.all_reduce(self._reduced, distributed.ReduceOp.MAX, group=self._group, async_op=True)
        return 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop here if a signal came or the time is up, and the step is whole."""
        time_is_up = _time_is_up(trainer)
        if time_is_up:
            trainer.should_stop = False  # in mid-step the timer will ask again
        if in_mid_step(trainer, batch_idx):
            return
        if signum := self._agreed():
            self._stop(trainer, signum, validation_due=validation_follows(trainer))
        elif time_is_up:
            _saver_of(trainer).save(trainer, validation_due=validation_follows(trainer))
            trainer.should_stop = True
            raise StopIteration  # Lightning leaves its loop, without the validation that should_stop alone would add

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Stop here if a signal came; the validation will be run again."""
        fitting = trainer.state.fn == "fit" and not trainer.sanity_checking
        if fitting and (signum := self._agreed()):
            self._stop(trainer, signum, validation_due=True)

    def _stop(self, trainer: Trainer, signum: int, validation_due: bool) -> None:
        step, schedule = trainer.global_step, trainer.lightning_module.schedule
        assert isinstance(schedule, PhaseSchedule)
        if step == schedule.total_steps and not validation_due:
            return  # the run is complete
        saver = _saver_of(trainer)
        path = saver.save(trainer, validation_due)
        saver.finish(trainer)
        self._message = (
            f"stopped by {signal.Signals(signum).name} after step {step} of {schedule.total_steps}: the same command "
            f"with --ckpt_path last goes on from {path}"
        )
        let_ranks_end()
        raise Stopped(128 + signum)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Say how to go on, below the progress bar."""
        self._restore()
        if self._message:
            say(self._message)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """There is nothing left to save."""
        if self._group is not None:
            if self._work is not None:
                self._work.wait()
            distributed.destroy_process_group(self._group)
            self._group = self._work = None
        self._restore()

    def _restore(self) -> None:
        if self.watch is not None:
            self.watch.polite = False
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)
        self._handlers = {}


class _OtherSignals(_SignalConnector):
    """Lightning's handlers but for the signals that are ours, SLURM's SIGUSR1 above all."""

    @staticmethod
    def _register_signal(signum: Any, handlers: Any) -> None:
        if signum not in SIGNALS:
            _SignalConnector._register_signal(signum, handlers)


def _time_is_up(trainer: Trainer) -> bool:
    schedule: PhaseSchedule = trainer.lightning_module.schedule  # type: ignore[assignment]
    timers = [callback for callback in trainer.callbacks if isinstance(callback, Timer)]  # type: ignore[attr-defined]
    return (
        trainer.should_stop
        and trainer.global_step < schedule.total_steps
        and trainer.fit_loop._can_stop_early  # min_steps
        and any(timer.time_remaining() is not None for timer in timers)
    )


def _saver(trainer: Trainer) -> StepCheckpoint | None:
    savers = (callback for callback in trainer.checkpoint_callbacks if isinstance(callback, StepCheckpoint))
    return next(savers, None)


def _saver_of(trainer: Trainer) -> StepCheckpoint:
    saver = _saver(trainer)
    assert saver is not None
    return saver
