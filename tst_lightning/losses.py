"""Multi-hot cross-entropy, on logits and fused with the output layer. Pure PyTorch.

With ``w_i`` the weight of offset i in a bag, ``n_i`` the number of valid targets at that offset, ``z_n`` the
logits of row n and ``c[n, i] = w_i * valid[n, i] / (n_i * sum(w))``, both functions compute::

    sum over n, i of c[n, i] * (logsumexp(z_n) - z_n[y_ni])

which is the weighted mean over offsets of ordinary mean cross-entropies, the loss of Token Superposition
Training (arXiv 2605.06546), from one softmax instead of S. With bags of one it is next-token cross-entropy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from tst_lightning.bags import IGNORE_INDEX
from tst_lightning.errors import UserError

WeightingName: TypeAlias = Literal["uniform", "power_law", "exponential", "first"]
Weighting: TypeAlias = WeightingName | Sequence[float]


def bag_weights(weighting: Weighting, bag_size: int) -> tuple[float, ...]:
    """The weight of each offset in the next bag, normalised to sum 1.

    Args:
        weighting: ``uniform``; ``power_law``, 1/i for the i-th token (counted from 1); ``exponential``,
            exp(-i); ``first``, the next token alone; or ``bag_size`` numbers of your own.
        bag_size: tokens a bag (S).

    Raises:
        UserError: naming every fault at once.
    """
    offsets = range(1, bag_size + 1)
    if isinstance(weighting, str):
        named: dict[str, list[float]] = {
            "uniform": [1.0 for _ in offsets],
            "power_law": [1.0 / i for i in offsets],
            "exponential": [math.exp(1 - i) for i in offsets],  # scaled by e, so that the sum is at least 1
            "first": [float(i == 1) for i in offsets],
        }
        if weighting not in named:
            raise UserError(
                f"weighting={weighting!r} is unknown: choose one of {', '.join(get_args(WeightingName))}, or "
                "give one number an offset"
            )
        weights = named[weighting]
    else:
        weights = [float(weight) for weight in weighting]
        faults = []
        if len(weights) != bag_size:
            faults.append(
                f"weighting has {len(weights)} numbers for bag_size={bag_size}: give one an offset, or a "
                "name such as 'uniform', which suits every bag size"
            )
        if bad := [weight for weight in weights if not 0 <= weight < math.inf]:  # nan is bad, too
            faults.append(f"weighting={weights} holds {bad}: every weight must be finite and not negative")
        elif not sum(weights) > 0:
            faults.append(f"weighting={weights} sums to 0: at least one weight must be positive")
        if faults:
            raise UserError(faults)
    total = math.fsum(weights)
    return tuple(weight / total for weight in weights)


def multi_hot_cross_entropy(
    logits_NV: Tensor,
    targets_NS: Tensor,
    weighting: Weighting = "uniform",
    ignore_index: int = IGNORE_INDEX,
) -> Tensor:
    """Mean cross-entropy of each row against all the tokens of its target bag.

    The slow and general form; :func:`linear_multi_hot_cross_entropy` does not hold the logits. A token that
    occurs twice in a bag counts twice. An offset without a valid target adds nothing.

    Args:
        logits_NV: (..., V), any floating type; computed in at least fp32.
        targets_NS: (..., S) token ids, int32 or int64, or ``ignore_index``.
        weighting: see :func:`bag_weights`.
        ignore_index: the target that is left out.

    Returns:
        Scalar, nats a token, fp32 (fp64 for fp64 logits).

    Raises:
        UserError: if the leading dimensions differ, or for a wrong ``weighting``.
    """
    _check_rows(logits_NV, targets_NS, "logits")
    logits_NV = logits_NV.flatten(0, -2).to(_at_least_fp32(logits_NV.dtype))
    targets_NS, shares_NS = _targets_and_shares(targets_NS.flatten(0, -2), weighting, ignore_index, logits_NV.dtype)
    log_sums_N1 = logits_NV.logsumexp(-1, keepdim=True)
    return (shares_NS * (log_sums_N1 - logits_NV.gather(-1, targets_NS))).sum()


def linear_multi_hot_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_NS: Tensor,
    weighting: Weighting = "uniform",
    ignore_index: int = IGNORE_INDEX,
    chunk_size: int | None = None,
) -> Tensor:
    """``multi_hot_cross_entropy(hidden @ weight.T, targets)`` without ever holding the N x V logits.

    Works through ``chunk_size`` rows at a time and computes the gradients in the forward pass, so that no
    logits are kept or computed twice. Logits and gradients accumulate in fp32 whatever the inputs' type;
    under autocast the operands are rounded to autocast's type first. The gradients are kept for one backward
    pass: a second one and double backward are refused.

    Args:
        hidden_ND: (..., D) hidden states.
        weight_VD: (V, D) weight of the output layer, of the hidden states' type (any, under autocast).
        targets_NS: (..., S) token ids, int32 or int64, or ``ignore_index``.
        weighting: see :func:`bag_weights`.
        ignore_index: the target that is left out.
        chunk_size: rows at a time; by default 256 on a CPU and 4,096 elsewhere.

    Returns:
        Scalar, nats a token, fp32 (fp64 for fp64 inputs).

    Raises:
        UserError: if shapes or types do not fit, or for a wrong ``weighting``.
    """
    _check_rows(hidden_ND, targets_NS, "hidden")
    device_type = hidden_ND.device.type
    if chunk_size is None:
        chunk_size = 256 if device_type == "cpu" else 4096
    faults = []
    if chunk_size < 1:
        faults.append(f"chunk_size={chunk_size} must be at least 1")
    if weight_VD.ndim != 2 or weight_VD.shape[-1] != hidden_ND.shape[-1]:
        faults.append(
            f"weight of shape {tuple(weight_VD.shape)} does not fit hidden of shape "
            f"{tuple(hidden_ND.shape)}: it must be (vocabulary, {hidden_ND.shape[-1]})"
        )
    # Autocast leaves fp64 alone, and so does this.
    autocast = torch.is_autocast_enabled(device_type) and torch.float64 not in (
        hidden_ND.dtype,
        weight_VD.dtype,
    )
    if hidden_ND.dtype != weight_VD.dtype and not autocast:
        faults.append(f"hidden is {hidden_ND.dtype} and weight {weight_VD.dtype}: cast one, or use autocast")
    if faults:
        raise UserError(faults)

    dtype = torch.get_autocast_dtype(device_type) if autocast else hidden_ND.dtype
    targets_NS, shares_NS = _targets_and_shares(
        targets_NS.flatten(0, -2), weighting, ignore_index, _at_least_fp32(dtype)
    )
    # ctx.needs_input_grad does not know of torch.no_grad.
    needs_grad = tuple(torch.is_grad_enabled() and tensor.requires_grad for tensor in (hidden_ND, weight_VD))
    loss: Tensor = _LinearMultiHotCrossEntropy.apply(
        hidden_ND.flatten(0, -2), weight_VD, targets_NS, shares_NS, dtype, chunk_size, needs_grad
    )
    return loss


class _LinearMultiHotCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_NS: Tensor,
        shares_NS: Tensor,
        dtype: torch.dtype,
        chunk_size: int,
        needs_grad: tuple[bool, bool],
    ) -> Tensor:
        wide = shares_NS.dtype
        rows = max(len(hidden_ND), 1)
        # A row's gradient is (softmax - target distribution), in [-1, 1], times a factor near 1 / rows, too
        # small for fp16. The factor goes to the narrow side of the products, times `rows`, which the backward
        # pass takes off again.
        factors_N1 = shares_NS.sum(-1, keepdim=True)
        parts_NS = shares_NS / factors_N1.where(factors_N1 > 0, 1)
        factors_N1 *= rows

        # Only CUDA multiplies low-precision operands into an fp32 result.
        operand_dtype = dtype if hidden_ND.is_cuda else wide
        operand_VD = weight_VD.to(dtype).to(operand_dtype)
        vocabulary = len(weight_VD)
        loss = shares_NS.new_zeros(())
        grad_ND = torch.empty_like(hidden_ND, dtype=wide) if needs_grad[0] else None
        grad_VD = torch.zeros_like(weight_VD, dtype=wide) if needs_grad[1] else None
        buffer_CV = shares_NS.new_empty(min(chunk_size, len(hidden_ND)), vocabulary)

        # Autocast leaves products into `out` and in place alone, so the types here are the ones given.
        for start in range(0, len(hidden_ND), chunk_size):
            rows_C = slice(start, start + chunk_size)
            operand_CD = hidden_ND[rows_C].to(dtype).to(operand_dtype)
            targets_CS, parts_CS = targets_NS[rows_C], parts_NS[rows_C]
            factors_C1 = factors_N1[rows_C]

            logits_CV = buffer_CV[: len(operand_CD)]
            _mm(operand_CD, operand_VD.T, out=logits_CV)
            # logsumexp and softmax by hand: they share their parts, and need no second buffer.
            target_logits_CS = logits_CV.gather(-1, targets_CS)
            peaks_C1 = logits_CV.amax(-1, keepdim=True)
            sums_C1 = logits_CV.sub_(peaks_C1).exp_().sum(-1, keepdim=True)
            loss += (shares_NS[rows_C] * (peaks_C1 + sums_C1.log() - target_logits_CS)).sum()
            if not any(needs_grad):
                continue
            grad_CV = logits_CV.mul_(sums_C1.reciprocal()).scatter_add_(-1, targets_CS, -parts_CS)
            grad_CV = grad_CV.to(operand_dtype)
            if grad_ND is not None:
                _mm(grad_CV, operand_VD, out=grad_ND[rows_C]).mul_(factors_C1)
            if grad_VD is not None:
                _add_mm_(grad_VD, grad_CV.T, (operand_CD * factors_C1).to(operand_dtype))

        ctx.grads = (grad_ND, grad_VD)
        ctx.dtypes = (hidden_ND.dtype, weight_VD.dtype)
        ctx.rows = rows
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        # once_differentiable would hand out gradients that silently miss their own graph.
        if torch.is_grad_enabled():
            raise RuntimeError(
                "linear_multi_hot_cross_entropy cannot be differentiated twice (create_graph=True): use "
                "multi_hot_cross_entropy"
            )
        if ctx.grads is None:
            raise RuntimeError(
                "linear_multi_hot_cross_entropy keeps its gradients for one backward pass, and this is the "
                "second: compute the loss again, or use multi_hot_cross_entropy"
            )
        grads, ctx.grads = ctx.grads, None
        scale = grad_loss / ctx.rows
        grad_ND, grad_VD = (
            None if grad is None else grad.mul_(scale).to(dtype) for grad, dtype in zip(grads, ctx.dtypes, strict=True)
        )
        return grad_ND, grad_VD, None, None, None, None, None


def _mm(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """``a @ b`` into ``out``, which may be fp32 for bf16 or fp16 operands on CUDA."""
    if a.dtype == out.dtype:
        return torch.mm(a, b, out=out)
    return torch.mm(a, b, out_dtype=out.dtype, out=out)


def _add_mm_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b``, where ``total`` may be fp32 for bf16 or fp16 operands on CUDA."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def _targets_and_shares(
    targets_NS: Tensor, weighting: Weighting, ignore_index: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The targets as indices (0 for the ignored ones) and ``c[n, i]``, each one's share in the loss."""
    valid_NS = targets_NS != ignore_index
    weights_S = torch.tensor(bag_weights(weighting, targets_NS.shape[-1]), dtype=dtype)
    # A copy that waits for the device would hold up the host every step.
    weights_S = weights_S.to(targets_NS.device, non_blocking=True)
    shares_NS = valid_NS * (weights_S / valid_NS.sum(0).clamp(min=1))
    return targets_NS.masked_fill(~valid_NS, 0).long(), shares_NS


def _check_rows(rows_ND: Tensor, targets_NS: Tensor, name: str) -> None:
    if rows_ND.ndim < 2 or rows_ND.shape[:-1] != targets_NS.shape[:-1] or targets_NS.shape[-1] < 1:
        raise UserError(
            f"{name} of shape {tuple(rows_ND.shape)} and targets of shape {tuple(targets_NS.shape)} do "
            "not fit: they must share every dimension but the last, and the targets' last is the bag size"
        )


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
