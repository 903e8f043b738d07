"""The LightningModule: one training step for both phases, plain validation, exact resume."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MeanMetric

from tst_lightning import __version__
from tst_lightning.bags import IGNORE_INDEX, fold, next_bag_targets
from tst_lightning.callbacks.metrics import StepMetrics
from tst_lightning.callbacks.ranks import end_process_groups_at_exit
from tst_lightning.callbacks.switch import PhaseSwitch
from tst_lightning.checkpoints import RECORD
from tst_lightning.errors import UserError
from tst_lightning.losses import Weighting, bag_weights
from tst_lightning.non_finite import check_finite
from tst_lightning.optim import decay_groups, schedule_faults, warmup_stable_decay
from tst_lightning.parallel import block_faults, fsdp_root, parallelise
from tst_lightning.phases import Phases, PhaseSchedule
from tst_lightning.resume import begin_at_step, differences
from tst_lightning.sharded import check_sharded
from tst_lightning.strategies import common_seed, sharding, shards, strategy_faults
from tst_lightning.trainer_checks import trainer_faults

ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}  # the default optimiser


class TSTModule(LightningModule):
    """Trains a network with Token Superposition Training; the result is an ordinary language model.

    The phase is read off the batch, which the data order makes a pure function of the optimiser step:
    ``(B, L, S)`` bags of tokens in a superposition phase, ``(B, L)`` plain tokens in the recovery phase.
    :class:`~tst_lightning.PhaseSwitch` holds every batch against the schedule.

    Args:
        network: called as ``network(bags (B, L, S), targets (B, L, S), weighting=...)`` for the loss and as
            ``network(bags)`` for logits ``(B, L, V)``, such as :class:`~tst_lightning.Transformer`.
        phases: the recipe's phases (linked to the recipe's top in the command line); all recovery if None.
        weighting: how the loss weighs the places of a bag: ``uniform``, ``power_law``, ``exponential``,
            ``first``, or one number for each place.
        optimizer: any torch optimiser; gets parameter groups in which norms and biases do not decay.
        warmup_steps: linear learning-rate warm-up, in optimiser steps.
        decay_ratio: share of the run, at its end, over which the rate falls linearly.
        final_lr_factor: what the rate falls to, as a multiple of its peak.
        activation_checkpointing: whether the backward pass computes each block again: less memory, a third more FLOPs.
        compile_blocks: whether each block is compiled (``torch.compile``), once for both phases.
    """

    schedule: PhaseSchedule  # resolved in setup

    def __init__(
        self,
        network: nn.Module,
        phases: Phases | None = None,
        weighting: Weighting = "uniform",
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(params, **ADAMW),
        warmup_steps: int = 0,
        decay_ratio: float = 0.1,
        final_lr_factor: float = 0.0,
        activation_checkpointing: bool = False,
        compile_blocks: bool = False,
    ) -> None:
        super().__init__()
        self.network = network
        # told apart from what sharding makes of them
        self.network_name = type(network).__name__
        self.num_parameters = sum(p.numel() for p in network.parameters())
        self.phases = phases or Phases()
        self.weighting = weighting
        self.optimizer = optimizer
        self.warmup_steps = warmup_steps
        self.decay_ratio = decay_ratio
        self.final_lr_factor = final_lr_factor
        self.activation_checkpointing = activation_checkpointing
        self.compile_blocks = compile_blocks
        self._parallelised = False
        self.step_loss = torch.zeros(())
        self.step_lr = math.nan
        self.step_grad_norm: Tensor | float = math.nan

    # ------------------------------------------------------------------ the method

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The loss of one micro-batch: ``(B, L, S)`` bags, or ``(B, L)`` tokens as bags of one."""
        bags_BLS = (batch if batch.ndim == 3 else fold(batch, 1)).long()
        loss: Tensor = self.network(
            bags_BLS, next_bag_targets(bags_BLS), weighting=self.weighting if batch.ndim == 3 else "uniform"
        )
        self._gather(loss.detach(), batch_idx)
        return loss

    def _gather(self, loss: Tensor, batch_idx: int) -> None:
        """Keep this rank's mean loss over the micro-batches of the step in ``step_loss``, on the device."""
        micro_batches = self.trainer.accumulate_grad_batches if self._trainer is not None else 1
        share = loss / micro_batches
        if batch_idx % micro_batches == 0:
            self.step_loss, self._losses = share, [loss]
        else:
            self.step_loss = self.step_loss + share
            self._losses.append(loss)

    def on_validation_epoch_start(self) -> None:
        """Begin anew."""
        self.val_losses: dict[int, MeanMetric] = {}  # by data loader: one for each source of a mixture

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Plain next-token loss whatever the phase: tokens ``(B, L)``, and which of the B windows count."""
        tokens_BL, counts_B = batch
        bags_BLS = fold(tokens_BL, 1).long()
        targets_BLS = next_bag_targets(bags_BLS).masked_fill(~counts_B[:, None, None], IGNORE_INDEX)
        loss = self.network(bags_BLS, targets_BLS)
        if dataloader_idx not in self.val_losses:
            # nan stays nan: by default it is left out, and "disable" forgets the weights (torchmetrics 1.9)
            metric = MeanMetric(nan_strategy=math.nan)
            metric.set_dtype(torch.float64).to(self.device)  # both in place
            self.val_losses[dataloader_idx] = metric
        self.val_losses[dataloader_idx].update(loss.double(), weight=(targets_BLS != IGNORE_INDEX).sum())

    def on_validation_epoch_end(self) -> None:
        """``val/loss`` in nats a token over all held-out windows of all ranks, and its exponential.

        In a mixture each source has its own, ``val/loss/NAME``, and ``val/loss`` is their mean by the sources' weights.
        """
        losses = [metric.compute() for _, metric in sorted(self.val_losses.items())]
        sources = getattr(self.trainer.datamodule, "sources", ())  # type: ignore[attr-defined]
        known = len(sources) == len(losses)
        weights = torch.tensor([source.weight for source in sources] if known else [1.0] * len(losses)).to(losses[0])
        loss = torch.stack(losses) @ (weights / weights.sum()) if len(losses) > 1 else losses[0]
        metrics = {"val/loss": loss, "val/perplexity": loss.exp()}
        if len(losses) > 1:
            names = self.trainer.datamodule.source_names if known else range(len(losses))  # type: ignore[attr-defined]
            metrics |= {f"val/loss/{name}": value for name, value in zip(names, losses, strict=True)}
        fitting = self.trainer.state.fn == "fit"
        # for callbacks that monitor, and what trainer.validate returns; in a fit our own row has the right step
        self.log_dict(metrics, logger=not fitting, sync_dist=True)
        if fitting and not self.trainer.sanity_checking:
            self.log_row(metrics)

    # ------------------------------------------------------------------ optimisation

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """The chosen optimiser over groups by name, and warmup-stable-decay as a function of the step."""
        optimizer = self.optimizer(decay_groups(self.named_parameters()))
        total_steps = self.schedule.total_steps

        def factor(step: int) -> float:
            return warmup_stable_decay(
                step,
                total_steps=total_steps,
                warmup_steps=self.warmup_steps,
                decay_ratio=self.decay_ratio,
                final_factor=self.final_lr_factor,
            )

        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"},
        }

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip, and keep the global norm before clipping and the rate of this step for the log.

        Raises:
            NonFiniteError: if the step's loss or gradients are not finite, before the optimiser steps.
        """
        self.step_lr = optimizer.param_groups[0]["lr"]
        if gradient_clip_val and self._unscales_itself(optimizer):
            raise UserError(
                f"{type(optimizer).__name__}(fused=True) under trainer.precision={self.trainer.precision} sees its "
                "gradients unscaled too late to clip them: set fused=False, or trainer.gradient_clip_val=null"
            )
        by_norm = gradient_clip_val and gradient_clip_algorithm in (None, "norm")
        max_norm = float(gradient_clip_val) if gradient_clip_val and by_norm else math.inf
        # FSDP1 wants its own root to do it (Lightning raises there, as of 2.6.6)
        root = fsdp_root(self)
        norm = nn.utils.clip_grad_norm_(self.parameters(), max_norm) if root is None else root.clip_grad_norm_(max_norm)
        self.step_grad_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        check_finite(self, self.step_grad_norm, self._losses)
        if gradient_clip_val and not by_norm:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def _unscales_itself(self, optimizer: Optimizer) -> bool:
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        return scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False)

    # ------------------------------------------------------------------ the run

    def configure_callbacks(self) -> list[Callback]:
        """The switch and the training log, in notebooks as on the command line."""
        return [PhaseSwitch(), StepMetrics()]

    def setup(self, stage: str) -> None:
        """Resolve the schedule, and refuse a run that cannot work before it starts."""
        end_process_groups_at_exit()
        if self.trainer.ckpt_path is not None and Path(self.trainer.ckpt_path).is_dir():
            check_sharded(Path(self.trainer.ckpt_path))  # PyTorch would execute what it holds
        if stage == "fit":
            self.check(self.trainer, self.trainer.datamodule)  # type: ignore[attr-defined]

    def configure_model(self) -> None:
        """Initialise the network where it is to be trained, and checkpoint, compile and shard it, once.

        Raises:
            UserError: if the network cannot be.
        """
        if self._parallelised or self._trainer is None:  # load_from_checkpoint
            return
        self.network = parallelise(
            self.network,
            self.trainer.strategy.root_device,
            seed=common_seed(self.trainer),
            activation_checkpointing=self.activation_checkpointing,
            compile_blocks=self.compile_blocks,
            shard=sharding(self.trainer),
        )
        self._parallelised = True

    def check(self, trainer: Trainer, datamodule: Any = None, checkpoint: Mapping[str, Any] | None = None) -> None:
        """Resolve ``schedule``, and hold everything that the run was given against everything else.

        Args:
            trainer: whose steps, ranks and accumulation count.
            datamodule: asked for its own faults if it can tell (:meth:`tst_lightning.TSTDataModule.faults`), as
                are the trainer's callbacks.
            checkpoint: what is to be resumed from, if anything.

        Raises:
            UserError: with all faults at once.
        """
        faults = trainer_faults(trainer) + strategy_faults(trainer)
        if self.activation_checkpointing or self.compile_blocks or shards(trainer):
            faults += block_faults(self.network)
        schedule = None
        try:
            schedule = self.schedule = self.phases.schedule(trainer.max_steps)
        except UserError as error:
            faults += error.faults
        else:
            for phase in schedule.phases:
                if phase.bag_size > 1:
                    faults += _faults(bag_weights, self.weighting, phase.bag_size)
            faults += schedule_faults(
                total_steps=schedule.total_steps,
                warmup_steps=self.warmup_steps,
                decay_ratio=self.decay_ratio,
                final_factor=self.final_lr_factor,
            )
        try:
            self._optimizer_record()
        except (ValueError, TypeError) as error:
            faults.append(f"model.optimizer: {error}")
        if hasattr(datamodule, "faults"):
            faults += datamodule.faults(trainer, schedule=schedule, vocab_size=self.vocab_size)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if hasattr(callback, "faults"):
                faults += callback.faults(trainer, datamodule)
        if checkpoint is not None and not faults:
            faults += self.resume_faults(checkpoint, trainer, datamodule)
        if faults:
            raise UserError(dict.fromkeys(faults))  # each fault once

    @property
    def vocab_size(self) -> int | None:
        """Rows of the network's vocabulary, where its config says."""
        size = getattr(getattr(self.network, "config", None), "vocab_size", None)
        return size if isinstance(size, int) else None

    def flops_per_token(self, latent_length: int) -> int | None:
        """Training FLOPs of a latent token, where the network's config can count them."""
        count = getattr(getattr(self.network, "config", None), "flops_per_token", None)
        return None if count is None else int(count(latent_length))

    def log_row(self, metrics: Mapping[str, float | Tensor]) -> None:
        """Write one row to every logger, at the number of optimiser steps done."""
        values = {name: float(value) if isinstance(value, Tensor) else value for name, value in metrics.items()}
        for logger in self.trainer.loggers:
            logger.log_metrics(values, step=self.trainer.global_step)

    def run_record(self) -> dict[str, Any]:
        """What defines this run and where it is trained, in plain types; the loggers keep it (``run.json``)."""
        record = self._record(self.trainer, self.trainer.datamodule)  # type: ignore[attr-defined]
        latent_length = record["data"].get("latent_length")
        device = self.trainer.strategy.root_device
        seed = os.environ.get("PL_GLOBAL_SEED")  # Lightning's seed_everything leaves it there
        return {
            "format": 1,
            "version": __version__,
            **record,
            "validation": {"limit_val_batches": self.trainer.limit_val_batches},
            "seed": None if seed is None else int(seed),
            "parameters": self.num_parameters,
            "flops_per_latent_token": None if latent_length is None else self.flops_per_token(latent_length),
            "machine": {
                "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
                "precision": str(self.trainer.precision),
                "processes": self.trainer.world_size,
                "torch": str(torch.__version__),
            },
        }

    def on_train_start(self) -> None:
        """The rate is a function of the step, not of what a checkpoint says: it differs where the run was extended."""
        for config in self.trainer.lr_scheduler_configs:
            scheduler = config.scheduler
            if not isinstance(scheduler, LambdaLR):  # a subclass's own
                continue
            for group, base, factor in zip(
                scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
            ):
                group["lr"] = base * factor(scheduler.last_epoch)

    # ------------------------------------------------------------------ checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what defines the run, in plain types: schedule, windows read, network shape, data, optimisation."""
        if not hasattr(self, "schedule"):  # nothing was trained
            return
        step, datamodule = self.trainer.global_step, self.trainer.datamodule  # type: ignore[attr-defined]
        batches = getattr(datamodule, "batches", None)
        read = {} if batches is None else {"windows_read": batches.position(self.schedule, step)}
        checkpoint[RECORD] = {**self._record(self.trainer, datamodule), "step": step, **read}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse to go on with a run that is not the same one, with every difference; else begin at its step."""
        if self._trainer is None or self.trainer.state.fn != "fit":
            return
        faults = self.resume_faults(checkpoint, self.trainer, self.trainer.datamodule)  # type: ignore[attr-defined]
        if faults:
            raise UserError(faults)
        begin_at_step(checkpoint, checkpoint[RECORD]["step"], self.trainer.accumulate_grad_batches)

    def resume_faults(self, checkpoint: Mapping[str, Any], trainer: Trainer, datamodule: Any = None) -> list[str]:
        """Why this run cannot go on from ``checkpoint``: empty if it can."""
        saved = checkpoint.get(RECORD)
        if saved is None:
            return ["the checkpoint was not saved by a TST run: there is no schedule in it to go on with"]
        faults = []
        old = PhaseSchedule.from_dict(saved["schedule"])
        longer = self.phases.extension > 0 and self.schedule.total_steps > old.total_steps
        if self.schedule != (old.lengthened(self.schedule.total_steps) if longer else old):
            faults.append(
                f"the checkpoint's phases are {old}, but this run's are {self.schedule}: resume with the phases and "
                "trainer.max_steps that it was started with (--extend STEPS makes the run longer), or start a new run"
            )
        if hasattr(datamodule, "go_on") and (unknown := datamodule.go_on(saved["data"], saved["step"])):
            return [*faults, *unknown]
        here = self._record(trainer, datamodule)
        may_change = {name: here["data"].get(name) for name in ("batch_changes", "skipped_steps") if here["data"]}
        for name, before in {**saved, "data": {**saved["data"], **may_change}}.items():
            if name in ("network", "optimisation", "data"):
                faults += differences(name, before, here[name])
        return faults

    def validation_faults(self, checkpoint: Mapping[str, Any], datamodule: Any = None) -> list[str]:
        """Why the weights of a TST run's ``checkpoint`` cannot be evaluated with this network and these data."""
        saved = checkpoint[RECORD]
        faults = differences("network", saved["network"], self._network_record())
        if hasattr(datamodule, "corpus"):
            name = "tokenizer_sha256"
            faults += differences("data", {name: saved["data"].get(name)}, {name: getattr(datamodule.corpus, name)})
        return faults

    def _record(self, trainer: Trainer, datamodule: Any) -> dict[str, Any]:
        """What must be the same on a resume, in plain types."""
        return {
            "schedule": self.schedule.to_dict(),
            "network": self._network_record(),
            "optimisation": {
                "weighting": self.weighting if isinstance(self.weighting, str) else [*self.weighting],
                "warmup_steps": self.warmup_steps,
                "decay_ratio": self.decay_ratio,
                "final_lr_factor": self.final_lr_factor,
                "gradient_clip_val": trainer.gradient_clip_val,
                "gradient_clip_algorithm": str(trainer.gradient_clip_algorithm or "norm"),
                **self._optimizer_record(),
            },
            "data": datamodule.record(self.schedule) if hasattr(datamodule, "record") else {},
        }

    def _network_record(self) -> dict[str, Any]:
        config = getattr(self.network, "config", None)
        record: dict[str, Any] = config.to_dict() if config is not None and hasattr(config, "to_dict") else {}
        return record

    def _optimizer_record(self) -> dict[str, Any]:
        """The optimiser's class and settings, read off one that is made for the purpose (and so proved to work)."""
        optimizer = self.optimizer(decay_groups(self.named_parameters()))
        settings = {
            f"optimizer.{name}": value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
            for name, value in optimizer.defaults.items()
        }
        return {"optimizer": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}", **settings}


def _faults(check: Any, *args: Any) -> tuple[str, ...]:
    try:
        check(*args)
    except UserError as error:
        return error.faults
    return ()
