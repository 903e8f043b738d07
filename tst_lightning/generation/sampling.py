"""Text from a network, token by token: the likeliest token, or nucleus sampling. Pure PyTorch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tst_lightning.bags import fold
from tst_lightning.errors import UserError
from tst_lightning.model import KeyValueCache, Transformer

PREFILL = 256
"""Positions of the prompt that are read at once: its logits and attention mask take memory for so many."""


def generate(
    network: nn.Module,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    stop_id: int | None = None,
    use_cache: bool = True,
) -> Iterator[Tensor]:
    """Continue token ids, each new id as soon as it is known.

    The network is run in evaluation mode and without gradients, and is in the caller's mode whenever an id is handed
    out. Global random states are neither used nor changed.

    Args:
        network: called as ``network(bags (B, L, 1))`` for logits (B, L, V). A :class:`~tst_lightning.Transformer`
            keeps what it has read; any other network reads the whole text again for every id.
        prompt: (L,) or (B, L) ids, L at least 1.
        max_new_tokens: ids to add at most.
        temperature: divides the logits; 0 takes the likeliest id.
        top_p: share of the probability, in (0, 1], that the likeliest ids among which is drawn must reach, see
            :func:`nucleus`.
        generator: draws; on a CPU it gives the same numbers whatever the network's device. By default a new one with
            an unforeseeable seed.
        stop_id: ends a text. It is handed out too, and again while other texts of the batch go on.
        use_cache: whether a Transformer keeps what it has read. The logits differ by rounding only.

    Returns:
        An iterator of () or (B,) int64 ids, on the network's device.

    Raises:
        UserError: at once, with every fault in the arguments.
        FloatingPointError: while iterating, if a logit is not a number.
    """
    faults = sampling_faults(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p)
    faults += _prompt_faults(prompt, getattr(getattr(network, "config", None), "vocab_size", None))
    if faults:
        raise UserError(faults)
    if generator is None:
        generator = torch.Generator()
        generator.seed()
    device = next((parameter.device for parameter in network.parameters()), prompt.device)
    tokens_BL = prompt.reshape(-1, prompt.shape[-1]).to(device, torch.int64)
    cache = None
    if use_cache and isinstance(network, Transformer):
        cache = KeyValueCache(network.config, tokens_BL.shape[1] + max_new_tokens - 1)  # the last id is never read
    ids = _stream(network, tokens_BL, max_new_tokens, temperature, top_p, generator, stop_id, cache)
    return (ids_B.view(prompt.shape[:-1]) for ids_B in ids)


def nucleus(logits_BV: Tensor, *, temperature: float, top_p: float) -> Tensor:
    """Probabilities at a temperature, of the likeliest ids only: the smallest set that reaches ``top_p`` together.

    Nucleus sampling, Holtzman et al. 2020, arXiv 1904.09751, section 3.1.

    Args:
        logits_BV: (B, V) in any floating-point type.
        temperature: above 0.
        top_p: in (0, 1]; 1 leaves every id in.

    Returns:
        (B, V) in fp64, in which no positive temperature or share is lost; rows sum to 1.
    """
    logits_BV = logits_BV.double()
    # the largest is taken off first, so that no division by a small temperature overflows
    probs_BV = ((logits_BV - logits_BV.amax(-1, keepdim=True)) / temperature).softmax(-1)
    if top_p == 1:  # a rounded sum may reach 1 before the last id
        return probs_BV
    sorted_BV, order_BV = torch.sort(probs_BV, dim=-1, descending=True, stable=True)
    likelier_BV = sorted_BV.cumsum(-1) - sorted_BV
    kept_BV = torch.zeros_like(probs_BV).scatter(-1, order_BV, sorted_BV.masked_fill(likelier_BV >= top_p, 0))
    return kept_BV / kept_BV.sum(-1, keepdim=True)


def sampling_faults(*, max_new_tokens: int, temperature: float, top_p: float) -> list[str]:
    """What is wrong with how to sample."""
    faults = []
    if max_new_tokens < 1:
        faults.append(f"max_new_tokens={max_new_tokens} must be at least 1")
    if not 0 <= temperature < math.inf:  # also true for nan
        faults.append(f"temperature={temperature} must be a number of at least 0 (0 takes the likeliest token)")
    if not 0 < top_p <= 1:
        faults.append(f"top_p={top_p} must lie in (0, 1] (1 draws among all tokens)")
    return faults


def _prompt_faults(prompt: Tensor, vocab_size: int | None) -> list[str]:
    if prompt.ndim not in (1, 2) or prompt.is_floating_point() or prompt.dtype == torch.bool:
        return [f"the prompt has shape {tuple(prompt.shape)} and type {prompt.dtype}: give (L,) or (B, L) token ids"]
    if not prompt.numel():
        return ["the prompt is empty: begin with the end-of-text token's id, which stands before every document"]
    low, high = (int(end) for end in prompt.long().aminmax())
    if low < 0:
        return [f"the prompt holds the id {low}: ids count from 0"]
    if vocab_size is not None and high >= vocab_size:
        return [f"the prompt holds the id {high}, but the network has vocab_size={vocab_size}"]
    return []


@torch.no_grad()
def _stream(
    network: nn.Module,
    tokens_BL: Tensor,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    generator: torch.Generator,
    stop_id: int | None,
    cache: KeyValueCache | None,
) -> Iterator[Tensor]:
    unread_BL = tokens_BL
    stopped_B = torch.zeros_like(tokens_BL[:, 0], dtype=torch.bool)
    for _ in range(max_new_tokens):
        with _evaluating(network):
            if cache is None:
                logits_BLV = network(fold(unread_BL, 1))
            else:
                for part_BL in torch.split(unread_BL, PREFILL, dim=-1):
                    logits_BLV = network(fold(part_BL, 1), cache=cache)
        ids_B = _draw(logits_BLV[:, -1], temperature, top_p, generator)
        if stop_id is not None:
            ids_B = ids_B.masked_fill(stopped_B, stop_id)
            stopped_B |= ids_B == stop_id
        yield ids_B
        if stop_id is not None and stopped_B.all():
            return
        new_B1 = ids_B.unsqueeze(-1)
        unread_BL = torch.cat((unread_BL, new_B1), -1) if cache is None else new_B1


def _draw(logits_BV: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> Tensor:
    if not logits_BV.amax(-1).isfinite().all():  # the largest of a row with a NaN in it is NaN
        raise FloatingPointError("the network's logits are not finite numbers: its training has diverged")
    if temperature == 0:
        return logits_BV.argmax(-1)
    probs_BV = nucleus(logits_BV.to(generator.device), temperature=temperature, top_p=top_p)
    return probs_BV.multinomial(1, generator=generator).squeeze(-1).to(logits_BV.device)


@contextmanager
def _evaluating(network: nn.Module) -> Iterator[None]:
    """Evaluation mode, and afterwards each module's own mode again."""
    training = [module for module in network.modules() if module.training]
    network.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
