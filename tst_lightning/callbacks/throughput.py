"""How fast a run goes: tokens a second, FLOP/s, model FLOPs utilisation, and the clock on the wall."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from tst_lightning import hardware
from tst_lightning.callbacks.steps import say, tokens_so_far
from tst_lightning.text import count

if TYPE_CHECKING:
    from tst_lightning.module import TSTModule


class Throughput(Callback):
    """Adds the speed since the last row to each row of the training log, and prints the run's at its end.

    Training time is what passes between rows, the reading of data included, validations and checkpoints left
    out. ``throughput/step_time`` is seconds an optimiser step; ``throughput/data_tokens_per_second`` and
    ``throughput/latent_tokens_per_second`` are over all ranks, and so is ``throughput/flops_per_second``, where
    the network's FLOPs are known (:meth:`~tst_lightning.TransformerConfig.flops_per_token`).
    ``throughput/mfu`` is the latter as a share of all devices' dense peak (model FLOPs utilisation, Chowdhery
    et al. 2022, appendix B), where that is known (:mod:`tst_lightning.hardware`). ``time/wall_clock`` counts the
    seconds since the run was started, the validations and checkpoints before the row included. What a killed run has
    to do again counts once, and the time between an end and a resume not at all.

    Nothing waits for the device but validations and checkpoints, which would anyway: a row is written when its
    loss has arrived.

    Args:
        peak_flops: dense peak of one device in FLOP/s at this run's precision, where the table lacks it.

    Raises:
        UserError: as the fit starts, for a peak that is no positive, finite number.
    """

    def __init__(self, peak_flops: float | None = None) -> None:
        self.peak_flops = peak_flops
        self._begin()

    def _begin(self) -> None:
        self._started = time.perf_counter()
        self._before = 0.0  # seconds of the run before this start
        self._opened: float | None = None  # since when training time counts; None while it does not
        self._seconds = 0.0  # training time since the last row, up to `_opened`
        self._last: tuple[int, int, int] | None = None  # steps, data and latent tokens at the last row
        self._peak: float | None = None  # of all devices
        self._sums: list[float] | None = None  # seconds, steps, tokens, FLOPs since the first row

    def faults(self, trainer: Trainer, datamodule: Any) -> list[str]:
        """What is wrong with the settings; the module asks before the fit starts."""
        if self.peak_flops is None or 0 < self.peak_flops < math.inf:
            return []
        return [f"Throughput: peak_flops={self.peak_flops} must be a device's dense FLOP/s, such as 989.4e12"]

    # ------------------------------------------------------------------ the clock

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start the clock."""
        if stage != "fit":
            return
        self._begin()
        device = trainer.strategy.root_device
        peak = self.peak_flops
        if peak is None and device.type == "cuda":
            tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
            peak = hardware.peak_flops(torch.cuda.get_device_name(device), str(trainer.precision), allow_tf32=tf32)
        self._peak = None if peak is None else peak * trainer.world_size

    def state_dict(self) -> dict[str, Any]:
        """The seconds of the run so far."""
        return {"wall_clock": self._wall_clock(time.perf_counter())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Count on from the checkpoint's seconds."""
        self._before = state_dict["wall_clock"]

    def _wall_clock(self, now: float) -> float:
        return self._before + now - self._started

    # ------------------------------------------------------------------ training time

    def on_train_batch_start(
        self,
        trainer: Trainer,
        pl_module: TSTModule,  # type: ignore[override]
        batch: Tensor,
        batch_idx: int,
    ) -> None:
        """Training time begins, or goes on after a validation or a checkpoint."""
        if self._opened is None:
            self._opened = time.perf_counter()
        if self._last is None:
            self._last = (trainer.global_step, *tokens_so_far(trainer, pl_module.schedule, batch))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training time pauses."""
        self._pause(pl_module)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Training time pauses."""
        self._pause(pl_module)

    def _pause(self, pl_module: LightningModule) -> None:
        if self._opened is None:
            return
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        self._seconds += time.perf_counter() - self._opened
        self._opened = None

    # ------------------------------------------------------------------ what is told

    def step_metrics(self, trainer: Trainer, pl_module: LightningModule, totals: Mapping[str, int]) -> dict[str, float]:
        """The speed since the last row; :class:`~tst_lightning.StepMetrics` asks when it has the gradients' norm."""
        now = time.perf_counter()
        if self._opened is not None:
            self._seconds += now - self._opened
            self._opened = now
        seconds, self._seconds = self._seconds, 0.0
        assert self._last is not None, "a row before the first batch"
        here = (trainer.global_step, totals["tokens/data"], totals["tokens/latent"])
        steps, data, latent = (after - before for after, before in zip(here, self._last, strict=True))
        flops = totals["compute/flops"] / totals["tokens/latent"] * latent if "compute/flops" in totals else 0.0
        self._last = here
        new = [seconds, steps, data, latent, flops]
        # the first row's interval holds the warm-up: compilation, allocation, the loader's start
        self._sums = [0.0] * 5 if self._sums is None else [a + b for a, b in zip(self._sums, new, strict=True)]

        metrics = {
            "time/wall_clock": self._wall_clock(now),
            "throughput/step_time": seconds / steps,
            "throughput/data_tokens_per_second": data / seconds,
            "throughput/latent_tokens_per_second": latent / seconds,
        }
        if flops:
            metrics["throughput/flops_per_second"] = flops / seconds
            if self._peak is not None:
                metrics["throughput/mfu"] = flops / seconds / self._peak
        return metrics

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the mean over all rows but the first."""
        if not self._sums or not self._sums[0]:
            return
        seconds, steps, data, latent, flops = self._sums
        line = (
            f"throughput     {count(latent / seconds)} latent and {count(data / seconds)} data tokens/s, "
            f"{1000 * seconds / steps:.3g} ms a step"
        )
        if flops:
            line += f", {flops / seconds / 1e12:.3g} TFLOP/s"
            if self._peak is not None:
                line += f" ({flops / seconds / self._peak:.1%} of the peak)"
        say(f"{line}, over {steps:.0f} steps")
