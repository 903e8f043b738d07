"""The DataModule: a prepared corpus, read in the order of the schedule."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from lightning.pytorch import LightningDataModule, Trainer
from torch.utils.data import DataLoader

from tst_lightning.data.corpus import Corpus
from tst_lightning.data.order import UNIT_WINDOWS, DataOrder, batch_faults
from tst_lightning.data.windows import WindowDataset, WindowLoader, held_out_loader
from tst_lightning.errors import UserError
from tst_lightning.phases import PhaseSchedule
from tst_lightning.text import count


class TSTDataModule(LightningDataModule):
    """Bagged or plain windows of a prepared corpus, as the module's schedule asks; plain held-out windows.

    Args:
        path: a directory made by ``tst-lightning prepare``.
        latent_length: positions that the model sees (L); a window is ``bag_size * latent_length`` tokens.
        global_batch_size: windows in one optimiser step, over all ranks and accumulated micro-batches.
        unit_windows: plain windows in a unit, the stretch of text that every bag size reads in turn; every bag
            size must divide it.
        seed: of the order of the data.
        val_batch_size: held-out windows in one batch of one rank; by default the training micro-batch.
        num_workers: loader processes; reading is so cheap that 0 or 1 is right.
    """

    def __init__(
        self,
        path: str,
        latent_length: int,
        global_batch_size: int,
        unit_windows: int = UNIT_WINDOWS,
        seed: int = 0,
        val_batch_size: int | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.path = path
        self.latent_length = latent_length
        self.global_batch_size = global_batch_size
        self.unit_windows = unit_windows
        self.seed = seed
        self.val_batch_size = val_batch_size
        self.num_workers = num_workers

    @cached_property
    def corpus(self) -> Corpus:
        """The prepared directory's sidecar."""
        return Corpus.load(self.path)

    def order(self, schedule: PhaseSchedule) -> DataOrder:
        """Which windows each step of ``schedule`` reads."""
        return DataOrder(
            schedule,
            tokens=self.corpus.splits["train"].tokens,
            latent_length=self.latent_length,
            global_batch_size=self.global_batch_size,
            seed=self.seed,
            unit_windows=self.unit_windows,
        )

    def faults(self, trainer: Trainer, *, schedule: PhaseSchedule | None, vocab_size: int | None) -> list[str]:
        """Everything in the data's configuration that this run cannot work with; no schedule: nothing is trained."""
        faults: list[str] = []
        # a window of one position has nothing to predict
        least = {"latent_length": 2, "global_batch_size": 1, "unit_windows": 1, "val_batch_size": 1}
        for name, lowest in least.items():
            value = getattr(self, name)
            if value is not None and value < lowest:
                faults.append(f"data.{name}={value} must be at least {lowest}")
        if self.num_workers < 0:
            faults.append(f"data.num_workers={self.num_workers} must be 0 or more")
        if not faults:
            faults += batch_faults(self.global_batch_size, trainer.world_size, trainer.accumulate_grad_batches)
        # no public name for it as of Lightning 2.6.6
        if trainer.world_size > 1 and trainer._accelerator_connector.use_distributed_sampler:
            faults.append("trainer.use_distributed_sampler=true would replace the exact data order: set it to false")
        try:
            corpus = self.corpus
        except UserError as error:
            return [*faults, *error.faults]
        held_out = corpus.splits["val"].tokens
        if held_out < self.latent_length:
            faults.append(
                f"{self.path} holds out {held_out} tokens, less than one window of {self.latent_length}: prepare it "
                "with a larger --held-out, or set a shorter data.latent_length"
            )
        if vocab_size is not None:
            if corpus.vocab_size > vocab_size:
                faults.append(
                    f"the corpus in {self.path} was tokenised with a vocabulary of {corpus.vocab_size}, but the "
                    f"network has {vocab_size} rows: set the network's vocab_size to {corpus.vocab_size} or more "
                    f"(--model.network.init_args.config.vocab_size {corpus.vocab_size}), or prepare the text with "
                    "another tokenizer"
                )
            elif corpus.max_token_id >= vocab_size:
                faults.append(
                    f"the corpus in {self.path} holds token id {corpus.max_token_id}, which a network with vocab_size "
                    f"{vocab_size} has no row for"
                )
        if schedule is not None and not faults:
            try:
                self.order(schedule)
            except UserError as error:
                faults += error.faults
        return faults

    def record(self, schedule: PhaseSchedule) -> dict[str, Any]:
        """What fixes the data and their order, in plain types."""
        return {
            **self.order(schedule).identity,
            "held_out_tokens": self.corpus.splits["val"].tokens,
            "tokenizer_sha256": self.corpus.tokenizer_sha256,
            "end_of_text": self.corpus.end_of_text,
        }

    def describe(self, schedule: PhaseSchedule, *, vocab_size: int | None) -> list[str]:
        """Lines for the opening summary: the corpus, what each phase reads of it, and what to think about."""
        train, held_out = self.corpus.splits["train"], self.corpus.splits["val"]
        order = self.order(schedule)
        shape = {"global_batch_size": self.global_batch_size, "latent_length": self.latent_length}
        lines = [
            f"corpus         {self.path}: {count(train.tokens)} tokens in {train.documents:,} documents, "
            f"{count(held_out.tokens)} held out",
            f"step           {self.global_batch_size} windows of {self.latent_length} positions, "
            f"{count(schedule.latent_tokens(1, **shape))} latent tokens",
        ]
        for phase in schedule.phases:
            data = schedule.data_tokens(phase.stop, **shape) - schedule.data_tokens(phase.start, **shape)
            lines.append(
                f"{phase.name:<15}steps {phase.start}-{phase.stop - 1}: {phase.steps} steps on {phase.reads}, "
                f"{count(data)} data tokens"
            )
        total = schedule.data_tokens(schedule.total_steps, **shape)
        unused = 0 if vocab_size is None else vocab_size - self.corpus.vocab_size
        epochs = order.epochs(schedule.total_steps)
        lines.append(f"in all         {count(total)} data tokens, {epochs:.2f} epochs of the corpus")
        if unused:
            lines.append(
                f"NOTE           the network has {vocab_size} rows for a tokenizer of {self.corpus.vocab_size}: "
                f"{unused} are never trained on"
            )
        if round(epochs, 2) > 1:
            lines.append(
                f"WARNING        the run reads the corpus {epochs:.2f} times: TST trades data for compute and is meant "
                "for runs that have more text than compute"
            )
        return lines

    def train_dataloader(self) -> WindowLoader:
        """Micro-batches of this rank: ``(B, L, S)`` in a superposition phase, ``(B, L)`` in recovery."""
        trainer = self._trainer()
        return WindowLoader(
            self._dataset("train"),
            self.order(trainer.lightning_module.schedule),  # type: ignore[arg-type]
            world_size=trainer.world_size,
            rank=trainer.global_rank,
            accumulation=trainer.accumulate_grad_batches,
            num_workers=self.num_workers,
            pin_memory=self._pin_memory(),
        )

    def val_dataloader(self) -> DataLoader[Any]:
        """Every held-out window once over all ranks, as ``(tokens (B, L), counts (B,))``."""
        trainer = self._trainer()
        micro_batch = max(1, self.global_batch_size // (trainer.world_size * trainer.accumulate_grad_batches))
        windows = self.corpus.splits["val"].tokens // self.latent_length
        share = -(-windows // trainer.world_size)  # a larger batch would be filled up with windows that do not count
        return held_out_loader(
            self._dataset("val"),
            batch_size=min(self.val_batch_size or micro_batch, share),
            world_size=trainer.world_size,
            rank=trainer.global_rank,
            num_workers=self.num_workers,
            pin_memory=self._pin_memory(),
        )

    def _trainer(self) -> Trainer:
        assert self.trainer is not None, "the loaders depend on the trainer's ranks and accumulation"
        return self.trainer

    def _pin_memory(self) -> bool:
        return self._trainer().strategy.root_device.type == "cuda"

    def _dataset(self, split: str) -> WindowDataset:
        return WindowDataset(
            self.corpus.split_directory(split),
            tokens=self.corpus.splits[split].tokens,
            latent_length=self.latent_length,
            record_tokens=self.corpus.record_tokens,
        )
