"""Text samples in TensorBoard, to read what a run has learned."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import FSDPStrategy

from tst_lightning.data.datamodule import TSTDataModule
from tst_lightning.data.tokenise import TextTokenizer, load_tokenizer
from tst_lightning.errors import UserError
from tst_lightning.generation.decoding import decode_stream
from tst_lightning.generation.sampling import generate, sampling_faults
from tst_lightning.phases import PhaseSchedule

if TYPE_CHECKING:
    from tst_lightning.module import TSTModule

HELD_OUT_PROMPT_TOKENS = 32


class Samples(Callback):
    """Writes text that the network generates to TensorBoard (``samples``) at each validation of a fit.

    In a superposition phase it says instead when there will be text: the network is trained to predict bags there.
    The same draws are made each time, apart from the random state of the training. A text is never longer than the
    windows that the network is trained on. Every rank generates the same, as parameters that FSDP2 shards need, and
    rank 0 writes; FSDP1 (``FSDPStrategy``) cannot run the network outside its own step, so there a line says so
    instead. Without a TensorBoard logger nothing happens.

    Args:
        prompts: what documents begin with; ``""`` begins with nothing, ``[]`` turns samples off. By default
            nothing, and the beginnings of two held-out windows.
        max_new_tokens: tokens to add at most.
        temperature: divides the logits; 0 takes the likeliest token.
        top_p: share of the probability that the tokens among which is drawn must reach.
        seed: of the draws.

    Raises:
        UserError: for values that make no sense; as the fit starts, if there is no corpus with a tokenizer or a
            prompt is too long.
    """

    def __init__(
        self,
        prompts: list[str] | None = None,
        max_new_tokens: int = 64,
        temperature: float = 0.8,
        top_p: float = 0.95,
        seed: int = 0,
    ) -> None:
        faults = sampling_faults(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p)
        if not 0 <= seed < 2**63:
            faults.append(f"seed={seed} must lie in [0, 2**63)")
        if faults:
            raise UserError(f"samples: {fault}" for fault in faults)
        self.prompts = prompts
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.top_p = top_p
        self.seed = seed

    def faults(self, trainer: Trainer, datamodule: Any) -> list[str]:
        """Why there cannot be samples of a run on ``datamodule``: empty if there can, or need not be."""
        try:
            if self._writers(trainer):
                self._encode(datamodule)
        except UserError as error:
            return list(error.faults)
        return []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Encode the prompts.

        Raises:
            UserError: with all :meth:`faults`.
        """
        if self._writers(trainer):
            datamodule: TSTDataModule = trainer.datamodule  # type: ignore[attr-defined]
            self._text, self._prompts = self._encode(datamodule)
            self._latent_length = datamodule.latent_length
            if self.prompts is None:
                self._prompts += _held_out_prompts(datamodule)

    def _encode(self, datamodule: Any) -> tuple[TextTokenizer, list[list[int]]]:
        """The tokenizer, and the prompts as documents begin."""
        if not isinstance(datamodule, TSTDataModule):
            raise UserError(
                "samples need the tokenizer of a prepared corpus: train with TSTDataModule, or leave Samples out"
            )
        corpus, latent_length = datamodule.corpus, datamodule.latent_length
        text = load_tokenizer(corpus.tokenizer_path, corpus.end_of_text)
        prompts = [""] if self.prompts is None else self.prompts
        encodings = [text.tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
        ids = [[text.end_of_text_id, *encoding.ids] for encoding in encodings]
        faults = [
            f"samples.prompts: {prompt!r} takes {len(tokens)} tokens, the end-of-text token before it included, and a "
            f"window has data.latent_length={latent_length}: shorten it"
            for prompt, tokens in zip(prompts, ids, strict=True)
            if len(tokens) >= latent_length
        ]
        if faults:
            raise UserError(faults)
        return text, ids

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: TSTModule) -> None:  # type: ignore[override]
        """Generate and write; checkpoints are saved after it and know of what was written."""
        writers = self._writers(trainer)
        if trainer.state.fn != "fit" or trainer.sanity_checking or not writers:
            return
        step, schedule = trainer.global_step, pl_module.schedule
        if schedule.at(max(step - 1, 0)).bag_size > 1:
            page = _no_text_yet(step, schedule)
        elif isinstance(trainer.strategy, FSDPStrategy):
            page = "**No text:** FSDPStrategy runs the network only inside a step. ModelParallelStrategy (FSDP2) can."
        else:
            with trainer.precision_plugin.val_step_context():
                page = "\n\n---\n\n".join(self._sample(pl_module.network, ids) for ids in self._prompts)
        for logger in writers:
            logger.experiment.add_text("samples", page, global_step=step)

    def _writers(self, trainer: Trainer) -> list[TensorBoardLogger]:
        if self.prompts == []:
            return []
        return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]

    def _sample(self, network: torch.nn.Module, prompt: Sequence[int]) -> str:
        """One sample in Markdown."""
        new = generate(
            network,
            torch.tensor(prompt),
            min(self.max_new_tokens, self._latent_length - len(prompt)),
            temperature=self.temperature,
            top_p=self.top_p,
            generator=torch.Generator().manual_seed(self.seed),
            # nothing stops it early, so that ranks that share parameters take part in the same number of steps
        )
        try:
            ids = [int(token) for token in new]
        except FloatingPointError as error:
            return f"**No text:** {error}."
        tokenizer, end_id = self._text.tokenizer, self._text.end_of_text_id
        shown = prompt[1:] if prompt[0] == end_id else prompt
        before = "**Prompt:** none, a document begins"
        if shown:
            before = f"**Prompt**\n\n{_code(tokenizer.decode(shown, skip_special_tokens=False))}"
        return f"{before}\n\n**Model**\n\n{_code(''.join(decode_stream(tokenizer, shown, ids, end_id)))}"


def _held_out_prompts(datamodule: TSTDataModule) -> list[list[int]]:
    """The beginnings of the first and the middle held-out window."""
    tokens, latent_length = datamodule.corpus.splits["val"].tokens, datamodule.latent_length
    length = min(HELD_OUT_PROMPT_TOKENS, latent_length // 2)
    middle = tokens // latent_length // 2 * latent_length
    stream = datamodule.stream("val")
    return [stream.read(start, length).tolist() for start in sorted({0, middle})]


def _no_text_yet(step: int, schedule: PhaseSchedule) -> str:
    starts = [phase.start for phase in schedule.phases if phase.bag_size == 1 and phase.start >= step]
    when = f"The recovery phase begins at step {starts[0]}." if starts else "This run has no recovery phase."
    return (
        f"**No text at step {step}:** in the superposition phase the model is trained to predict the next bag of "
        f"{schedule.at(step - 1).bag_size} tokens, not the next token, so what it generates means nothing yet. {when}"
    )


def _code(text: str) -> str:
    """A code block of Markdown that nothing in ``text`` can end."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"
