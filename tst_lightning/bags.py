"""Tokens to bags: folding, the mean bag embedding and the next-bag targets. Pure PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tst_lightning.errors import UserError

IGNORE_INDEX = -100
"""Target of a position that has nothing to predict, as in :func:`torch.nn.functional.cross_entropy`."""


def fold(tokens_BT: Tensor, bag_size: int) -> Tensor:
    """Fold a window of ``S * L`` tokens into ``L`` bags of ``S = bag_size`` consecutive tokens.

    Token Superposition Training, arXiv 2605.06546, the superposition phase.

    Args:
        tokens_BT: (..., S * L) token ids of any integer type.
        bag_size: tokens a bag (S); 1 is plain training.

    Returns:
        (..., L, S), a view of ``tokens_BT``.

    Raises:
        UserError: if ``bag_size`` is less than 1 or does not divide the window.
    """
    if bag_size < 1:
        raise UserError(f"bag_size={bag_size} must be at least 1 (1 is plain training)")
    length, rest = divmod(tokens_BT.shape[-1], bag_size)
    if rest:
        raise UserError(
            f"a window of {tokens_BT.shape[-1]} tokens does not fold into bags of bag_size={bag_size}: "
            f"read bag_size * latent_length tokens, such as {length * bag_size} or {(length + 1) * bag_size}"
        )
    return tokens_BT.view(*tokens_BT.shape[:-1], length, bag_size)


def embed_bags(weight_VD: Tensor, bags_BLS: Tensor) -> Tensor:
    """The mean of each bag's embeddings, summed in at least fp32.

    A bag of one is an ordinary lookup: forward and gradient are those of
    :func:`torch.nn.functional.embedding`, bit for bit. The exception is a bf16 or fp16 weight on a CPU, where
    PyTorch adds up the weight's gradient in the weight's own type (frequent tokens are off by tens of
    percent): there the lookup goes through fp32, which leaves the forward of a bag of one as it is and gives
    the gradient that a lookup in fp32 would.

    Args:
        weight_VD: (V, D) embedding table.
        bags_BLS: (..., S) token ids in ``[0, V)``, int32 or int64; S at least 1.

    Returns:
        (..., D) in the weight's type.
    """
    table_VD = weight_VD
    if weight_VD.device.type == "cpu" and weight_VD.dtype in (torch.bfloat16, torch.float16):
        table_VD = weight_VD.float()
    if bags_BLS.shape[-1] == 1:
        # embedding_bag adds up the gradient in another order: it differs from plain training in the last bit.
        embedded_BLD = F.embedding(bags_BLS.squeeze(-1), table_VD)
    else:
        embedded_ND = F.embedding_bag(bags_BLS.flatten(0, -2), table_VD, mode="mean")
        embedded_BLD = embedded_ND.view(*bags_BLS.shape[:-1], weight_VD.shape[-1])
    return embedded_BLD.to(weight_VD.dtype)


def next_bag_targets(bags_BLS: Tensor) -> Tensor:
    """What each bag is to predict: the bag after it, and nothing after the last.

    Bags are shifted, not tokens: bagging labels that were already shifted by one token would put ``S - 1`` of
    each bag's targets into its own input.

    Args:
        bags_BLS: (..., L, S) token ids of any integer type.

    Returns:
        (..., L, S) int64; the last bag's targets are :data:`IGNORE_INDEX`.
    """
    targets_BLS = torch.full_like(bags_BLS, IGNORE_INDEX, dtype=torch.int64)
    targets_BLS[..., :-1, :] = bags_BLS[..., 1:, :]
    return targets_BLS
