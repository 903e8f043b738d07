"""What the callbacks ask of a step, and how they speak."""

from __future__ import annotations

import sys

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from tqdm import tqdm

from tst_lightning.batches import Batches
from tst_lightning.phases import PhaseSchedule


def tokens_so_far(trainer: Trainer, schedule: PhaseSchedule, batch: Tensor) -> tuple[int, int]:
    """Data and latent tokens that the steps done were trained on, over all ranks.

    The data module knows the global batch of every step; of another one, it is told from the shape of a micro-batch.
    """
    B, L = batch.shape[:2]
    batches: Batches | None = getattr(trainer.datamodule, "batches", None)  # type: ignore[attr-defined]
    if batches is None:
        batches = Batches.constant(B * trainer.world_size * trainer.accumulate_grad_batches)
    step = trainer.global_step
    return batches.data_windows(schedule, step) * L, batches.latent_windows(step) * L


def in_mid_step(trainer: Trainer, batch_idx: int) -> bool:
    """Whether more micro-batches of the optimiser step follow ``batch_idx``."""
    return (batch_idx + 1) % trainer.accumulate_grad_batches != 0


@rank_zero_only
def say(line: str) -> None:
    """A line on rank 0's standard output, above the progress bar if there is one."""
    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()
