"""What Lightning's Trainer offers and an exact run cannot use."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import Trainer


def trainer_faults(trainer: Trainer) -> list[str]:
    """A sentence for each such option that is set."""
    faults = []
    limit: Any = trainer.limit_train_batches
    # the integer 1 is one batch, the float 1.0 all of them
    if not (isinstance(limit, float) and limit == 1.0) or trainer.overfit_batches or trainer.fast_dev_run:  # type: ignore[attr-defined]
        faults.append(
            "trainer.limit_train_batches, overfit_batches and fast_dev_run would cut the data order short: for a "
            "trial run set trainer.max_steps (and model.warmup_steps) to a few steps"
        )
    interval, accumulation = getattr(trainer, "val_check_interval", None), trainer.accumulate_grad_batches
    if isinstance(interval, float):
        interval = max(1, int(trainer.max_steps * accumulation * interval))
    if interval is None:
        faults.append(
            "trainer.val_check_interval is a time, and a resumed run would validate at other steps: give a number of "
            "micro-batches"
        )
    elif interval < 1:
        faults.append(f"trainer.val_check_interval={interval} must be at least 1 (limit_val_batches=0 validates never)")
    elif interval % accumulation:
        faults.append(
            f"trainer.val_check_interval={interval} micro-batches would validate in the middle of a step: use a "
            f"multiple of accumulate_grad_batches={accumulation}"
        )
    if trainer.log_every_n_steps < 0:  # type: ignore[attr-defined]
        faults.append(f"trainer.log_every_n_steps={trainer.log_every_n_steps} must not be negative")  # type: ignore[attr-defined]
    if trainer.gradient_clip_val is not None and not 0 <= trainer.gradient_clip_val < math.inf:
        faults.append(
            f"trainer.gradient_clip_val={trainer.gradient_clip_val} must be a positive number, or null for no clipping"
        )
    return faults
