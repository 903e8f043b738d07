"""What happens where one phase ends and the next begins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, Trainer
from torch import Tensor

from tst_lightning.callbacks.steps import in_mid_step, say

if TYPE_CHECKING:
    from tst_lightning.module import TSTModule


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
            say(f"step {step}: the {before.name} phase ({before.reads}) ends, {after.name} ({after.reads}) begins")
        if step == pl_module.schedule.total_steps:
            trainer.should_stop = True  # makes Lightning validate here whatever val_check_interval is
