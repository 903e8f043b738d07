"""The DataModule: prepared corpora, read in the order of the schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from lightning.pytorch import LightningDataModule, Trainer
from torch.utils.data import DataLoader

from tst_lightning.batches import Batches
from tst_lightning.data.corpus import Corpus
from tst_lightning.data.distribute import batch_faults
from tst_lightning.data.order import UNIT_WINDOWS, DataOrder
from tst_lightning.data.sources import DataSource, chosen_sources, load_corpora, source_names
from tst_lightning.data.windows import TokenStream, WindowDataset, WindowLoader, held_out_loader
from tst_lightning.errors import UserError
from tst_lightning.phases import PhaseSchedule
from tst_lightning.text import count


class TSTDataModule(LightningDataModule):
    """Bagged or plain windows of prepared corpora, as the module's schedule asks; plain held-out windows.

    Args:
        path: a directory made by ``tst-lightning prepare``, or its ``s3://`` or ``gs://`` URL; or ``sources``.
        latent_length: positions that the model sees (L); a window is ``bag_size * latent_length`` tokens.
        global_batch_size: windows in one optimiser step, over all ranks and accumulated micro-batches.
        unit_windows: plain windows in a unit, the stretch of text that every bag size reads in turn; every bag
            size must divide it.
        seed: of the order of the data.
        val_batch_size: held-out windows in one batch of one rank; by default the training micro-batch.
        num_workers: loader processes; reading is so cheap that 0 or 1 is right.
        sources: the corpora of a mixture with their weights, instead of ``path``.
        skip_steps: steps whose batch is thrown away, the step trains on the next one instead; a step named twice
            throws two away. The way past text on which a run turned bad.
    """

    def __init__(
        self,
        path: str | None = None,
        *,
        latent_length: int,
        global_batch_size: int,
        unit_windows: int = UNIT_WINDOWS,
        seed: int = 0,
        val_batch_size: int | None = None,
        num_workers: int = 0,
        sources: list[DataSource] | None = None,
        skip_steps: list[int] | None = None,
    ) -> None:
        super().__init__()
        self.path = path
        self.latent_length = latent_length
        self.global_batch_size = global_batch_size
        self.unit_windows = unit_windows
        self.seed = seed
        self.val_batch_size = val_batch_size
        self.num_workers = num_workers
        self.given_sources = sources
        self.skip_steps = skip_steps or []
        self._before: Batches | None = None  # what a run that goes on has read already, and how

    @cached_property
    def sources(self) -> tuple[DataSource, ...]:
        """The corpora and their weights, one or several."""
        return chosen_sources(self.path, self.given_sources)

    @property
    def source_names(self) -> list[str]:
        """What the sources are called in the log."""
        return source_names(self.sources)

    @cached_property
    def corpora(self) -> tuple[Corpus, ...]:
        """The prepared directories' sidecars; they share one tokenizer."""
        return load_corpora(self.sources)

    @property
    def corpus(self) -> Corpus:
        """The first of the corpora."""
        return self.corpora[0]

    @property
    def batches(self) -> Batches:
        """The global batch size of every step, before a resume too."""
        return self._before or Batches.constant(self.global_batch_size, self.skip_steps)

    def order(self, schedule: PhaseSchedule) -> DataOrder:
        """Which windows each step of ``schedule`` reads."""
        return DataOrder(
            schedule,
            tokens=tuple(corpus.splits["train"].tokens for corpus in self.corpora),
            latent_length=self.latent_length,
            batches=self.batches,
            seed=self.seed,
            weights=tuple(source.weight for source in self.sources),
            unit_windows=self.unit_windows,
        )

    def go_on(self, saved: Mapping[str, Any], step: int) -> list[str]:
        """Take over what a checkpoint at ``step`` says was read before (its record's ``data``).

        Another global batch size begins at ``step``, where the old one left off.

        Returns:
            Why this run's data cannot go on from there; empty if they can.
        """
        first, changes = saved.get("global_batch_size"), saved.get("batch_changes")
        skipped = saved.get("skipped_steps")
        if first is None or changes is None or skipped is None:
            return ["the checkpoint was saved by an earlier version, whose order of the data is not known here"]
        before = Batches(((0, first), *((change[0], change[1]) for change in changes)), tuple(skipped))
        late = [skip for skip, times in Counter(self.skip_steps).items() if skip < step and times > skipped.count(skip)]
        self._before = before.skipping(self.skip_steps).resized(step, self.global_batch_size)
        return [
            f"data.skip_steps={skip}: the checkpoint is at step {step} and has trained on that batch: go on from a "
            f"checkpoint at step {skip} or before"
            for skip in sorted(late)
        ]

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
        if schedule is not None:
            last = schedule.total_steps - 1
            faults += [
                f"data.skip_steps={step} must lie in [0, {last}], the run's steps"
                for step in self.skip_steps
                if not 0 <= step <= last
            ]
        if not faults:
            faults += batch_faults(self.global_batch_size, trainer.world_size, trainer.accumulate_grad_batches)
        # no public name for it as of Lightning 2.6.6
        if trainer.world_size > 1 and trainer._accelerator_connector.use_distributed_sampler:
            faults.append("trainer.use_distributed_sampler=true would replace the exact data order: set it to false")
        try:
            corpora = self.corpora
        except UserError as error:
            return [*faults, *error.faults]
        for source, corpus in zip(self.sources, corpora, strict=True):
            faults += self._corpus_faults(source.path, corpus, vocab_size)
        if schedule is not None and not faults:
            try:
                self.order(schedule)
            except UserError as error:
                faults += error.faults
        return faults

    def _corpus_faults(self, path: str, corpus: Corpus, vocab_size: int | None) -> list[str]:
        faults = []
        held_out = corpus.splits["val"].tokens
        if held_out < self.latent_length:
            faults.append(
                f"{path} holds out {held_out} tokens, less than one window of {self.latent_length}: prepare it "
                "with a larger --held-out, or set a shorter data.latent_length"
            )
        if vocab_size is not None and corpus.vocab_size > vocab_size:
            faults.append(
                f"the corpus in {path} was tokenised with a vocabulary of {corpus.vocab_size}, but the "
                f"network has {vocab_size} rows: set the network's vocab_size to {corpus.vocab_size} or more "
                f"(--model.network.init_args.config.vocab_size {corpus.vocab_size}), or prepare the text with "
                "another tokenizer"
            )
        elif vocab_size is not None and corpus.max_token_id >= vocab_size:
            faults.append(
                f"the corpus in {path} holds token id {corpus.max_token_id}, which a network with vocab_size "
                f"{vocab_size} has no row for"
            )
        return faults

    def record(self, schedule: PhaseSchedule) -> dict[str, Any]:
        """What fixes the data and their order, in plain types."""
        train, held_out = ([corpus.splits[name] for corpus in self.corpora] for name in ("train", "val"))
        return {
            **self.order(schedule).identity,
            "batch_changes": [[*change] for change in self.batches.sizes[1:]],
            "skipped_steps": [*self.batches.skipped],
            "train_sha256": [split.sha256 for split in train],
            "held_out_sha256": [split.sha256 for split in held_out],
            "held_out_tokens": [split.tokens for split in held_out],
            "tokenizer_sha256": self.corpus.tokenizer_sha256,
            "end_of_text": self.corpus.end_of_text,
        }

    def position_of(self, schedule: PhaseSchedule, step: int) -> str:
        """Where in the corpora the batch of ``step`` lies, for people."""
        order = self.order(schedule)
        places: dict[int, list[int]] = {}
        for window in order.batch(step):
            places.setdefault(window.source, []).append(window.start)
        length = self.latent_length * schedule.at(step).bag_size
        return "; ".join(
            f"{self.sources[source].path}: windows of {length} tokens from {_listed(starts)}"
            for source, starts in sorted(places.items())
        )

    def describe(self, schedule: PhaseSchedule, *, vocab_size: int | None) -> list[str]:
        """Lines for the opening summary: the corpora, what each phase reads of them, and what to think about."""
        order, batches, end = self.order(schedule), self.batches, schedule.total_steps
        lines = []
        for source, corpus, share in zip(self.sources, self.corpora, order.shares, strict=True):
            train, held_out = corpus.splits["train"], corpus.splits["val"]
            part = "" if len(self.sources) == 1 else f"{float(share):.1%} from "
            lines.append(
                f"corpus         {part}{source.path}: {count(train.tokens)} tokens in {train.documents:,} documents, "
                f"{count(held_out.tokens)} held out"
            )
        lines.append(
            f"step           {self.global_batch_size} windows of {self.latent_length} positions, "
            f"{count(self.global_batch_size * self.latent_length)} latent tokens"
        )
        for phase in schedule.phases:
            windows = batches.data_windows(schedule, phase.stop) - batches.data_windows(schedule, phase.start)
            lines.append(
                f"{phase.name:<15}steps {phase.start}-{phase.stop - 1}: {phase.steps} steps on {phase.reads}, "
                f"{count(windows * self.latent_length)} data tokens"
            )
        epochs = [order.epochs(end, source) for source in range(len(self.sources))]
        total = count(batches.data_windows(schedule, end) * self.latent_length)
        each = " and ".join(f"{value:.2f}" for value in epochs)
        lines.append(f"in all         {total} data tokens, {each} epochs of the corpus")
        if len(batches.sizes) > 1:
            sizes = ", ".join(f"{size} from step {step} on" for step, size in batches.sizes)
            lines.append(f"NOTE           the global batch changes on the way: {sizes}")
        if batches.skipped:
            steps = ", ".join(map(str, batches.skipped))
            lines.append(f"NOTE           skipped: the batch that these steps would have read: {steps}")
        unused = 0 if vocab_size is None else vocab_size - self.corpus.vocab_size
        if unused:
            lines.append(
                f"NOTE           the network has {vocab_size} rows for a tokenizer of {self.corpus.vocab_size}: "
                f"{unused} are never trained on"
            )
        for source, value in zip(self.sources, epochs, strict=True):
            if round(value, 2) > 1:
                which = "the corpus" if len(self.sources) == 1 else source.path
                lines.append(
                    f"WARNING        the run reads {which} {value:.2f} times: TST trades data for compute and is meant "
                    "for runs that have more text than compute"
                )
        return lines

    def train_dataloader(self) -> WindowLoader:
        """Micro-batches of this rank: ``(B, L, S)`` in a superposition phase, ``(B, L)`` in recovery."""
        trainer = self._trainer()
        return WindowLoader(
            WindowDataset([self.stream("train", source) for source in range(len(self.corpora))], self.latent_length),
            self.order(trainer.lightning_module.schedule),  # type: ignore[arg-type]
            world_size=trainer.world_size,
            rank=trainer.global_rank,
            accumulation=trainer.accumulate_grad_batches,
            num_workers=self.num_workers,
            pin_memory=self._pin_memory(),
        )

    def val_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """Every held-out window once over all ranks, as ``(tokens (B, L), counts (B,))``; a loader a source."""
        trainer = self._trainer()
        micro_batch = max(1, self.global_batch_size // (trainer.world_size * trainer.accumulate_grad_batches))
        loaders = []
        for source, corpus in enumerate(self.corpora):
            windows = corpus.splits["val"].tokens // self.latent_length
            share = -(
                -windows // trainer.world_size
            )  # a larger batch would be filled up with windows that do not count
            loaders.append(
                held_out_loader(
                    WindowDataset([self.stream("val", source)], self.latent_length),
                    batch_size=min(self.val_batch_size or micro_batch, share),
                    world_size=trainer.world_size,
                    rank=trainer.global_rank,
                    num_workers=self.num_workers,
                    pin_memory=self._pin_memory(),
                )
            )
        return loaders if len(loaders) > 1 else loaders[0]

    def stream(self, split: str, source: int = 0) -> TokenStream:
        """The flat token stream of one split of a source."""
        corpus = self.corpora[source]
        return TokenStream(
            corpus.split_directory(split), tokens=corpus.splits[split].tokens, record_tokens=corpus.record_tokens
        )

    def _trainer(self) -> Trainer:
        assert self.trainer is not None, "the loaders depend on the trainer's ranks and accumulation"
        return self.trainer

    def _pin_memory(self) -> bool:
        return self._trainer().strategy.root_device.type == "cuda"


def _listed(starts: Sequence[int], shown: int = 8) -> str:
    return ", ".join(f"{start:,}" for start in starts[:shown]) + (", ..." if len(starts) > shown else "")
