"""Token Superposition Training on PyTorch Lightning.

Names are imported when they are first used, so that ``import tst_lightning`` and the light commands load
neither torch nor Lightning.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from tst_lightning.bags import embed_bags, fold, next_bag_targets
    from tst_lightning.batches import Batches
    from tst_lightning.callbacks.checkpoint import StepCheckpoint
    from tst_lightning.callbacks.metrics import StepMetrics
    from tst_lightning.callbacks.progress import RunSummary, StepProgress
    from tst_lightning.callbacks.samples import Samples
    from tst_lightning.callbacks.stop import GracefulStop
    from tst_lightning.callbacks.switch import PhaseSwitch
    from tst_lightning.callbacks.throughput import Throughput
    from tst_lightning.config import TransformerConfig
    from tst_lightning.data.corpus import Corpus
    from tst_lightning.data.datamodule import TSTDataModule
    from tst_lightning.data.import_tokens import import_tokens
    from tst_lightning.data.merge import merge
    from tst_lightning.data.order import DataOrder
    from tst_lightning.data.prepare import prepare
    from tst_lightning.data.sources import DataSource
    from tst_lightning.errors import TSTWarning, UserError
    from tst_lightning.generation.sampling import generate
    from tst_lightning.loggers import MetricsCSV, TensorBoard
    from tst_lightning.losses import bag_weights, linear_multi_hot_cross_entropy, multi_hot_cross_entropy
    from tst_lightning.model import KeyValueCache, Transformer
    from tst_lightning.module import TSTModule
    from tst_lightning.non_finite import NonFiniteError
    from tst_lightning.optim import decay_groups, warmup_stable_decay
    from tst_lightning.phases import Phase, Phases, PhaseSchedule, Stage
    from tst_lightning.strategies import FSDP2Strategy

_HOMES = {
    "bags": ("embed_bags", "fold", "next_bag_targets"),
    "batches": ("Batches",),
    "callbacks.checkpoint": ("StepCheckpoint",),
    "callbacks.metrics": ("StepMetrics",),
    "callbacks.progress": ("RunSummary", "StepProgress"),
    "callbacks.samples": ("Samples",),
    "callbacks.stop": ("GracefulStop",),
    "callbacks.switch": ("PhaseSwitch",),
    "callbacks.throughput": ("Throughput",),
    "config": ("TransformerConfig",),
    "data.corpus": ("Corpus",),
    "data.datamodule": ("TSTDataModule",),
    "data.import_tokens": ("import_tokens",),
    "data.merge": ("merge",),
    "data.order": ("DataOrder",),
    "data.prepare": ("prepare",),
    "data.sources": ("DataSource",),
    "errors": ("TSTWarning", "UserError"),
    "generation.sampling": ("generate",),
    "loggers": ("MetricsCSV", "TensorBoard"),
    "losses": ("bag_weights", "linear_multi_hot_cross_entropy", "multi_hot_cross_entropy"),
    "model": ("KeyValueCache", "Transformer"),
    "module": ("TSTModule",),
    "non_finite": ("NonFiniteError",),
    "optim": ("decay_groups", "warmup_stable_decay"),
    "phases": ("Phase", "PhaseSchedule", "Phases", "Stage"),
    "strategies": ("FSDP2Strategy",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [  # noqa: RUF022 (the order of the rooms)
    "embed_bags",
    "fold",
    "next_bag_targets",
    "bag_weights",
    "linear_multi_hot_cross_entropy",
    "multi_hot_cross_entropy",
    "Phase",
    "PhaseSchedule",
    "Phases",
    "Stage",
    "Batches",
    "TransformerConfig",
    "Transformer",
    "KeyValueCache",
    "generate",
    "decay_groups",
    "warmup_stable_decay",
    "Corpus",
    "DataOrder",
    "DataSource",
    "TSTDataModule",
    "prepare",
    "merge",
    "import_tokens",
    "FSDP2Strategy",
    "TSTModule",
    "GracefulStop",
    "PhaseSwitch",
    "RunSummary",
    "Samples",
    "StepCheckpoint",
    "StepMetrics",
    "StepProgress",
    "Throughput",
    "MetricsCSV",
    "TensorBoard",
    "NonFiniteError",
    "TSTWarning",
    "UserError",
]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
