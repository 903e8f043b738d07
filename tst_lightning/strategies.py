"""FSDP2 by one word, with hybrid sharding; and how a strategy shards the network."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, StrategyRegistry
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.wrap import wrap

from tst_lightning.parallel import Shard, fsdp1, fsdp2


class FSDP2Strategy(ModelParallelStrategy):
    """Lightning's ``ModelParallelStrategy`` set to shard the weights over all ranks; ``fsdp2`` on the command line.

    Args:
        shard_size: how many ranks share one copy of the weights, such as the GPUs of a node (hybrid sharding); all of
            them by default.
        **kwargs: ``ModelParallelStrategy``'s own but for the sizes.
    """

    def __init__(self, shard_size: int | None = None, **kwargs: Any) -> None:
        super().__init__(data_parallel_size=1, tensor_parallel_size=1, **kwargs)
        self.shard_size = shard_size

    def setup_environment(self) -> None:
        """Shard over everyone there is."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def sharding_mesh(self) -> DeviceMesh:
        """Copies by shards, or with one copy only the shards."""
        if self.shard_size is None or self.shard_size == self.world_size:
            return self.device_mesh["data_parallel"]
        shape = (self.world_size // self.shard_size, self.shard_size)
        return init_device_mesh(self.root_device.type, shape, mesh_dim_names=("copy", "shard"))


StrategyRegistry.register("fsdp2", FSDP2Strategy, "fully sharded data parallel, PyTorch's second generation")


def strategy_faults(trainer: Trainer) -> list[str]:
    """A sentence for each of the strategy's options that cannot work, or is set elsewhere here."""
    strategy, world_size = trainer.strategy, trainer.world_size
    faults = []
    if isinstance(strategy, FSDPStrategy):
        if "auto_wrap_policy" in strategy.kwargs:
            faults.append("trainer.strategy.auto_wrap_policy: leave it out, the blocks are wrapped without it")
        if strategy._activation_checkpointing_kwargs:
            faults.append(
                "trainer.strategy.activation_checkpointing_policy would come after compilation: leave it out, and set "
                "model.activation_checkpointing"
            )
        if world_size == 1:
            faults.append(
                "FSDPStrategy does not shard over one process (FSDP1 becomes NO_SHARD): take trainer.strategy=auto, or "
                "fsdp2, which also goes on with the checkpoints of more processes"
            )
    if isinstance(strategy, FSDP2Strategy):
        size = strategy.shard_size
        if size is not None and (size < 1 or world_size % size):
            faults.append(
                f"trainer.strategy.shard_size={size} does not divide the {world_size} processes: ranks that share one "
                "copy of the weights, such as a node's GPUs"
            )
    elif isinstance(strategy, ModelParallelStrategy):
        sizes = (strategy._data_parallel_size, strategy._tensor_parallel_size)
        if sizes != (world_size, 1):
            faults.append(
                f"trainer.strategy has data_parallel_size={sizes[0]} and tensor_parallel_size={sizes[1]}, and every "
                f"rank reads data of its own here: set {world_size} and 1, or trainer.strategy=fsdp2"
            )
    return faults


def shards(trainer: Trainer) -> bool:
    """Whether the trainer's strategy shards the network."""
    return isinstance(trainer.strategy, (FSDPStrategy, ModelParallelStrategy))


def saves_shards(trainer: Trainer) -> bool:
    """Whether every rank writes its own part of a checkpoint."""
    strategy = trainer.strategy
    if isinstance(strategy, FSDPStrategy):
        return strategy._state_dict_type == "sharded"
    return isinstance(strategy, ModelParallelStrategy) and strategy._save_distributed_checkpoint


def saves_in_background(trainer: Trainer) -> bool:
    """Whether it can do so from a copy: torch 2.14 cannot copy the shards that FSDP1 saves."""
    return saves_shards(trainer) and isinstance(trainer.strategy, ModelParallelStrategy)


def sharding(trainer: Trainer) -> Shard | None:
    """How the trainer's strategy shards one unit of the network; None if it keeps whole copies."""
    strategy, precision = trainer.strategy, str(trainer.precision)
    if isinstance(strategy, FSDPStrategy):
        return fsdp1(strategy.root_device, precision, wrap)
    if isinstance(strategy, FSDP2Strategy):
        return fsdp2(strategy.sharding_mesh(), precision)
    if isinstance(strategy, ModelParallelStrategy):
        return fsdp2(strategy.device_mesh["data_parallel"], precision)
    return None


def common_seed(trainer: Trainer) -> int:
    """Rank 0's."""
    seed: int = trainer.strategy.broadcast(torch.initial_seed())
    return seed
