"""Activation checkpointing, then compilation, then sharding: in this one place and in this order. Pure PyTorch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from tst_lightning.errors import UserError
from tst_lightning.model import LanguageModelHead

Shard = Callable[[nn.Module], nn.Module]


def parallelise(
    network: nn.Module,
    device: torch.device,
    *,
    seed: int = 0,
    activation_checkpointing: bool = False,
    compile_blocks: bool = False,
    shard: Shard | None = None,
) -> nn.Module:
    """Make a network ready to train: initialised where it belongs, its blocks checkpointed, compiled and sharded.

    What is on the meta device is initialised a module at a time and sharded as soon as its unit is whole, so that no
    rank ever holds more than its shards and one unit. Every rank draws the same whole weights from ``seed``, which
    therefore do not depend on how many ranks there are or on how they share the weights.

    The units are the network's ``blocks``, its embedding and its output layer where they are not tied, and the rest.

    Args:
        network: whose ``blocks`` are its repeated layers; needed for all but the initialisation.
        device: where parameters that are on the meta device get their values.
        seed: for their values.
        activation_checkpointing: whether a block keeps only its input for the backward pass, and computes the
            rest again there: about a third more FLOPs for far less memory (Chen et al., arXiv 1604.06174).
        compile_blocks: whether ``torch.compile`` compiles each block's training step. Their shape does not change at
            a switch, so it compiles once; without gradients blocks run as they are.
        shard: shards one unit and returns what to put in its place (:func:`fsdp1`, :func:`fsdp2`).

    Returns:
        The network, or what ``shard`` has made of it.

    Raises:
        UserError: if the network says nothing of its blocks, or a module on the meta device cannot be initialised.
    """
    blocks = list(getattr(network, "blocks", ()))
    if (activation_checkpointing or compile_blocks or shard is not None) and (faults := block_faults(network)):
        raise UserError(faults)
    for block in blocks:
        if activation_checkpointing:
            _checkpoint(block)
        if compile_blocks:
            _compile(block)
    units = {network, *blocks, *_tables(network, blocks)} if shard is not None else set()
    made: dict[nn.Parameter, nn.Parameter] = {}

    def visit(module: nn.Module) -> nn.Module:
        _initialise(module, device, made)
        for name, child in list(module.named_children()):
            visited = visit(child)
            if visited is not child:
                module.register_module(name, visited)
        return shard(module) if shard is not None and module in units else module

    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        return visit(network)


def block_faults(network: nn.Module) -> list[str]:
    """Why a network cannot be checkpointed, compiled or sharded."""
    if getattr(network, "blocks", None):
        return []
    return [
        f"{type(network).__name__} does not say which of its modules repeat, so it cannot be checkpointed, compiled or "
        "sharded block by block: give it a property `blocks`, or train it whole (trainer.strategy=auto or ddp)"
    ]


def fsdp1(device: torch.device, precision: str, wrap: Callable[..., nn.Module]) -> Shard:
    """Shards a unit by ``FullyShardedDataParallel``.

    Args:
        device: of this rank.
        precision: Lightning's name for it; ``bf16-mixed`` computes in bf16 and keeps and sums in fp32.
        wrap: such as :func:`torch.distributed.fsdp.wrap.wrap` where the strategy has set its options.
    """
    options: dict[str, Any] = {"device_id": device}
    if precision == "bf16-mixed":  # Lightning 2.6.6 would reduce gradients, and round buffers, in bf16
        options["mixed_precision"] = MixedPrecision(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.float32
        )
    return partial(wrap, **options)


def fsdp2(mesh: DeviceMesh, precision: str) -> Shard:
    """Shards a unit by ``fully_shard``.

    Args:
        mesh: of one dimension, or of two for hybrid sharding (copies, then shards).
        precision: Lightning's name for it; ``bf16-mixed`` computes in bf16 and keeps and sums in fp32.
    """
    policy = MixedPrecisionPolicy()
    if precision == "bf16-mixed":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    elif precision == "bf16-true":
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)

    def shard(unit: nn.Module) -> nn.Module:
        fully_shard(unit, mesh=mesh, mp_policy=policy)
        return unit

    return shard


def fsdp_root(module: nn.Module) -> FullyShardedDataParallel | None:
    """The outermost module that FSDP1 has wrapped, if any."""
    return next((part for part in module.modules() if isinstance(part, FullyShardedDataParallel)), None)


def _checkpoint(block: nn.Module) -> None:
    # the forward rather than the module is replaced: names stay, and FSDP's hooks run once, outside
    block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def _compile(block: nn.Module) -> None:
    plain, compiled = block.forward, torch.compile(block.forward, dynamic=False)

    def forward(*args: Any, **kwargs: Any) -> Any:
        # held-out windows and samples may have any shape
        return (compiled if torch.is_grad_enabled() else plain)(*args, **kwargs)

    block.forward = forward


def _tables(network: nn.Module, blocks: list[nn.Module]) -> Iterator[nn.Module]:
    """Embedding and output layer, unless they share their weight: then it stays with the rest of the network."""
    inside = {part for block in blocks for part in block.modules()}
    uses: Counter[torch.Tensor] = Counter(
        parameter for _, parameter in network.named_parameters(remove_duplicate=False)
    )
    for module in network.modules():
        if isinstance(module, (nn.Embedding, LanguageModelHead)) and module not in inside and uses[module.weight] == 1:
            yield module


def _initialise(module: nn.Module, device: torch.device, made: dict[nn.Parameter, nn.Parameter]) -> None:
    """Give the module's own meta parameters storage and values; those it shares with another are ``made`` once."""
    empty = {name: p for name, p in module.named_parameters(recurse=False) if p.is_meta}
    buffers = {name: b for name, b in module.named_buffers(recurse=False) if b.is_meta}
    new = [p for p in empty.values() if p not in made]
    for name, parameter in empty.items():
        if parameter in new:
            made[parameter] = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
        module.register_parameter(name, made[parameter])
    for name, buffer in buffers.items():
        persistent = name not in module._non_persistent_buffers_set
        module.register_buffer(name, torch.empty_like(buffer, device=device), persistent=persistent)
    if not new and not buffers:
        return
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        raise UserError(
            f"{type(module).__name__} has {', '.join([*empty, *buffers])} on the meta device and no reset_parameters "
            "that would initialise them: give it one, or build it on a real device"
        )
    reset()
