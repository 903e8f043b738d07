"""Which parameters decay, and the learning rate as a pure function of the step. Pure PyTorch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

from torch.nn import Parameter


def decay_groups(
    named_parameters: Iterable[tuple[str, Parameter]], no_decay: Sequence[str] = ("norm", "bias")
) -> list[dict[str, Any]]:
    """Parameter groups for an optimiser: what decays by its own ``weight_decay``, and what does not decay.

    Matrices decay, the embedding and the output layer among them; norms and biases do not. The name decides
    rather than the number of dimensions, for FSDP1 flattens every parameter to one dimension.

    Args:
        named_parameters: what ``module.named_parameters()`` gives. Frozen parameters are left out; a
            parameter with two names counts once, by its first.
        no_decay: a parameter whose name contains one of these does not decay.

    Returns:
        The decaying group and then the other, with ``weight_decay: 0.0``; without groups that are empty.
    """
    decay: list[Parameter] = []
    constant: list[Parameter] = []
    seen: set[Parameter] = set()
    for name, parameter in named_parameters:
        if not parameter.requires_grad or parameter in seen:
            continue
        seen.add(parameter)
        (constant if any(word in name for word in no_decay) else decay).append(parameter)
    groups: list[dict[str, Any]] = [{"params": decay}, {"params": constant, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def warmup_stable_decay(
    step: int, *, total_steps: int, warmup_steps: int, decay_ratio: float = 0.1, final_factor: float = 0.0
) -> float:
    """The factor on the peak learning rate at optimiser step ``step`` (counted from 0).

    Linear warm-up, constant, linear decay (WSD: Hu et al., MiniCPM, arXiv 2404.06395, section 4). Token
    Superposition Training (arXiv 2605.06546) uses 2,000 warm-up steps and decays over the last 10%. With W
    warm-up steps and ``D = decay_ratio * total_steps`` decay steps (rounded to the nearest, halves up, on the
    decimal number that was written):

    - step 0 has ``1 / W``, step ``W - 1`` is the first with 1;
    - step ``total_steps - D`` is the last with 1, step ``total_steps - 1`` has ``1 / D`` of the way left to
      ``final_factor`` and so still learns;
    - from ``total_steps`` on it is ``final_factor``, which with D = 0 is a drop from 1.

    See :func:`schedule_faults` for the arguments that make sense.
    """
    if step >= total_steps:
        return final_factor
    decay_steps = _decay_steps(total_steps, decay_ratio)
    warmup = min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0
    left = min(1.0, (total_steps - step) / decay_steps) if decay_steps else 1.0
    return warmup * (final_factor + (1.0 - final_factor) * left)


def schedule_faults(
    *, total_steps: int, warmup_steps: int, decay_ratio: float = 0.1, final_factor: float = 0.0
) -> list[str]:
    """What is wrong with the arguments of :func:`warmup_stable_decay`: a sentence a fault and the way out."""
    faults = []
    if total_steps < 1:
        faults.append(f"a run needs at least one optimiser step, not {total_steps}: set trainer.max_steps")
    if warmup_steps < 0:
        faults.append(f"model.warmup_steps={warmup_steps} must not be negative: 0 is no warm-up")
    if not 0 <= final_factor <= 1:  # nan is outside, too
        faults.append(
            f"model.final_lr_factor={final_factor} must lie in [0, 1]: the share of the peak rate that is left"
        )
    if not 0 <= decay_ratio <= 1:
        faults.append(
            f"model.decay_ratio={decay_ratio} must lie in [0, 1]: the share of steps that decay (0.1 in the paper)"
        )
    elif not faults and warmup_steps + (decay_steps := _decay_steps(total_steps, decay_ratio)) > total_steps:
        faults.append(
            f"model.warmup_steps={warmup_steps} and {decay_steps} steps of decay (decay_ratio={decay_ratio}) do "
            f"not fit into {total_steps} steps: use at most {total_steps - decay_steps} warm-up steps, "
            "or raise trainer.max_steps"
        )
    return faults


def _decay_steps(total_steps: int, decay_ratio: float) -> int:
    return math.floor(Fraction(str(decay_ratio)) * total_steps + Fraction(1, 2))
