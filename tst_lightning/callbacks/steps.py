"""What the callbacks ask of a step, and how they speak."""

from __future__ import annotations

import sys

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from tqdm import tqdm

from tst_lightning.phases import PhaseSchedule


def tokens_so_far(trainer: Trainer, schedule: PhaseSchedule, batch: Tensor) -> tuple[int, int]:
    """Data and latent tokens of the steps done, over all ranks, told from the shape of one micro-batch."""
    B, L = batch.shape[:2]
    shape = {"global_batch_size": B * trainer.world_size * trainer.accumulate_grad_batches, "latent_length": L}
    step = trainer.global_step
    return schedule.data_tokens(step, **shape), schedule.latent_tokens(step, **shape)


def in_mid_step(trainer: Trainer, batch_idx: int) -> bool:
    """Whether more micro-batches of the optimiser step follow ``batch_idx``."""
    return (batch_idx + 1) % trainer.accumulate_grad_batches != 0


@rank_zero_only
def say(line: str) -> None:
    """A line on rank 0's standard output, above the progress bar if there is one."""
    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()
