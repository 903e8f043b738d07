"""What is said when a loss or a gradient is no longer a number."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from tst_lightning.callbacks.checkpoint import StepCheckpoint
from tst_lightning.callbacks.ranks import let_ranks_end
from tst_lightning.checkpoints import list_checkpoints

if TYPE_CHECKING:
    from tst_lightning.module import TSTModule


class NonFiniteError(ArithmeticError):
    """A loss or a gradient was infinite or not a number; the optimiser has not stepped and nothing was saved.

    The command line prints it without a traceback and exits with status 1.
    """


def check_finite(module: TSTModule, norm: Tensor | float, losses: Sequence[Tensor]) -> None:
    """Stop the run, on every rank, where a micro-batch's loss or the gradients' global norm is not finite.

    Waits for the device once. Under a gradient scaler (fp16) an infinite norm is the scaler's business: it
    leaves the step out and scales less, so there only the losses count.

    Args:
        module: whose step it is.
        norm: of the gradients over all ranks.
        losses: of this rank's micro-batches.

    Raises:
        NonFiniteError: on every rank.
    """
    trainer = module.trainer
    norm = getattr(norm, "full_tensor", lambda: norm)()  # FSDP2's is sharded
    finite = torch.stack([loss.detach().float() for loss in losses]).isfinite()
    bad = ~finite.all()
    if getattr(trainer.precision_plugin, "scaler", None) is None:
        bad = bad | ~torch.as_tensor(norm, device=bad.device).isfinite()
    # the same on every rank, whose own losses differ
    if float(trainer.strategy.reduce(bad.float(), reduce_op="sum")):
        let_ranks_end()
        everyone = trainer.strategy.all_gather(finite).reshape(-1, len(losses))
        raise NonFiniteError(_message(module, trainer, float(norm), everyone.tolist()))


def _message(module: TSTModule, trainer: Trainer, norm: float, finite: list[list[bool]]) -> str:
    step = trainer.global_step
    places = [
        f"rank {rank}, micro-batch {index}"
        for rank, losses in enumerate(finite)
        for index, is_finite in enumerate(losses)
        if not is_finite
    ]
    what = f"the loss of {'; '.join(places)}" if places else f"the gradients' norm ({norm}), though no loss,"
    lines = [f"step {step}: {what} was not finite. The optimiser has not stepped and nothing was saved"]
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    if hasattr(datamodule, "position_of"):
        lines.append(f"the step's text: {datamodule.position_of(module.schedule, step)}")
    saved = _saved(trainer)
    lines.append(f"the last good checkpoint: {saved[-1]}" if saved else "there is no checkpoint yet")
    again = "--ckpt_path last" if saved else "the same command"
    skipped = sorted([*(datamodule.batches.skipped if hasattr(datamodule, "batches") else ()), step])
    lines.append(
        f"ways out: {again} with --data.skip_steps '{skipped}' leaves this step's text out; a lower learning rate, a "
        "longer warm-up or tighter clipping (trainer.gradient_clip_val) in a new run, if it happens again"
    )
    return "\n".join(lines)


def _saved(trainer: Trainer) -> list[Path]:
    savers = [saver for saver in trainer.checkpoint_callbacks if isinstance(saver, StepCheckpoint)]
    return [path for saver in savers for path in list_checkpoints(saver.folder(trainer))]
