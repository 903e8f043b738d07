"""What a person sees of a run: the opening summary and the progress bar."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from tqdm import tqdm

from tst_lightning.callbacks.steps import in_mid_step, say, tokens_so_far
from tst_lightning.text import count

if TYPE_CHECKING:
    from tst_lightning.module import TSTModule


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
            say(
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
            values = {name: float(value) for name, value in trainer.callback_metrics.items()}
            step = f"step {trainer.global_step}: " if trainer.state.fn == "fit" else ""
            prefix = "val/loss/"
            each = [f"{k.removeprefix(prefix)} {v:.4f}" for k, v in values.items() if k.startswith(prefix)]
            sources = f" ({', '.join(each)})" if each else ""
            loss, perplexity = values["val/loss"], values["val/perplexity"]
            say(f"{step}held-out loss {loss:.4f} nats a token{sources}, perplexity {perplexity:.2f}")

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
        parameters = pl_module.num_parameters
        lines = [
            f"network        {pl_module.network_name}, {count(parameters)} parameters ({parameters:,})",
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
            say(line)
