"""Tokenizers for a prepared corpus: load or train one, and turn documents into ids."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tst_lightning.data.corpus import dtype_for
from tst_lightning.data.documents import End, Piece, read_piece
from tst_lightning.data.parts import PartWriter
from tst_lightning.data.stores import StorePath
from tst_lightning.errors import UserError

END_OF_TEXT = "<|endoftext|>"
KNOWN_ENDS_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]")

AMBIGUOUS = "text holds the end-of-text token"

_BATCH_CHARACTERS = 1 << 20  # an encoded batch takes about 30 times as much memory
_END_CHARACTERS = 100  # what the end of a document counts for

# Splitting patterns (GPT-2; Llama 3; Qwen) of which no match holds an ASCII letter or digit and a newline
# after it, and none looks back: a cut between the two changes no match on either side.
_CUTTABLE_PATTERNS = {
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer set up for documents: nothing truncated, padded or added, special tokens in text are text.

    Attributes:
        tokenizer: the Hugging Face tokenizer.
        end_of_text: the token that closes a document.
        end_of_text_id: its id.
        vocab_size: the largest id plus one.
        cuttable: a text may be encoded in the stretches of
            :func:`~tst_lightning.data.documents.read_piece` without any change of its tokens.
    """

    tokenizer: Tokenizer
    end_of_text: str
    end_of_text_id: int
    vocab_size: int
    cuttable: bool

    @property
    def dtype(self) -> str:
        """The dtype of the ids on disk."""
        return dtype_for(self.vocab_size)


def load_tokenizer(path: Path | StorePath, end_of_text: str | None = None) -> TextTokenizer:
    """Read a Hugging Face ``tokenizer.json``.

    Args:
        path: the file.
        end_of_text: the token that closes a document; by default the first well-known one that it has.

    Raises:
        UserError: if it cannot be read, draws its tokens at random or has no end-of-text token.
    """
    try:
        tokenizer = Tokenizer.from_buffer(path.read_bytes())
    except Exception as error:  # tokenizers 0.23 raises nothing more specific
        raise UserError(f"--tokenizer {path} cannot be read ({error}): give a Hugging Face tokenizer.json") from error
    state = json.loads(tokenizer.to_str())
    if state["model"].get("dropout"):
        raise UserError(
            f"--tokenizer {path} draws its tokens at random (dropout={state['model']['dropout']}): "
            "set the model's dropout to null in it"
        )
    candidates = KNOWN_ENDS_OF_TEXT if end_of_text is None else (end_of_text,)
    ids = {token: tokenizer.token_to_id(token) for token in candidates}
    end = next(((token, index) for token, index in ids.items() if index is not None), None)
    if end is None:
        special = [token["content"] for token in state["added_tokens"] if token["special"]]
        has = f"its special tokens are {', '.join(special[:8])}" if special else "it has no special tokens"
        raise UserError(
            f"--tokenizer {path} has no token {' or '.join(candidates)} to end documents with ({has}): "
            "name one of its tokens with --end-of-text"
        )
    if lost := _bytes_without_a_token(state):
        raise UserError(
            f"--tokenizer {path} has no token for {len(lost)} of the 256 bytes ({', '.join(lost[:4])}, ...) and would "
            "drop them from the text: train it with initial_alphabet=pre_tokenizers.ByteLevel.alphabet()"
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return TextTokenizer(
        tokenizer=tokenizer,
        end_of_text=end[0],
        end_of_text_id=end[1],
        vocab_size=max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1,
        cuttable=_is_cuttable(state),
    )


def train_tokenizer(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Train a byte-level BPE tokenizer with exactly ``vocab_size`` tokens and save it, whole or not at all.

    ``<|endoftext|>`` has id 0, the 256 bytes follow, so that no text is unknown; no space is added in front.
    The same texts give the same file.

    Args:
        texts: what it learns from; documents, or stretches of them that :class:`TextTokenizer` may cut.
        vocab_size: at least 257.
        path: where ``tokenizer.json`` is written.

    Raises:
        UserError: if the texts are too few for so many tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    size = tokenizer.get_vocab_size()
    if size != vocab_size:
        raise UserError(
            f"--train-tokenizer {vocab_size}: the training documents repeat too little for more than {size} "
            f"tokens: ask for {size} or fewer, or give more text"
        )
    unfinished = path.with_name(f"{path.name}.tmp")
    tokenizer.save(str(unfinished))
    unfinished.replace(path)


def encode_pieces(
    pieces: Iterable[Piece], tokenizer: TextTokenizer, part: PartWriter, advance: Callable[[int, int, int], None]
) -> None:
    """Write the ids of every document, each closed by the end-of-text token.

    A document whose text holds the end-of-text token, where the tokenizer cannot write that as ordinary text, is
    left out.

    Args:
        pieces: the input, in order.
        tokenizer: what encodes it.
        part: where the ids go.
        advance: told of input bytes read, of documents and of tokens written.

    Raises:
        UnreadableInput: if an input cannot be read to its end.
        UserError: if an id lies outside the vocabulary.
    """
    writer = _Writer(tokenizer, part)
    for batch in _batches(pieces, tokenizer.cuttable, lambda size: advance(size, 0, 0)):
        documents, tokens = writer.add(batch)
        advance(0, documents, tokens)


class _Writer:
    """Encodes batches of text and gives them to a part: as few calls for a batch as can be."""

    def __init__(self, tokenizer: TextTokenizer, part: PartWriter) -> None:
        self._tokenizer = tokenizer
        self._part = part
        self._end = np.array([tokenizer.end_of_text_id], dtype=np.uint32)
        self._whole: list[NDArray[np.uint32]] = []  # ids of documents that have ended
        self._lengths: list[tuple[int, int]] = []  # theirs
        self._first: str | None = None  # the name of the first one
        self._open: list[NDArray[np.uint32]] = []  # ids of the document that has not, as far as not given to the part
        self._tokens = 0  # of it in all
        self._ambiguous = False  # whether its text holds the end-of-text token

    def add(self, batch: Sequence[str | End]) -> tuple[int, int]:
        """Write a batch, and say how many documents and tokens it added."""
        end_id = self._tokenizer.end_of_text_id
        texts = [text for text in batch if isinstance(text, str)]
        encodings = iter(self._tokenizer.tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        documents = tokens = 0
        for text in batch:
            if isinstance(text, str):
                ids = next(encodings).ids
                self._open.append(np.array(array("I", ids), dtype=np.uint32))  # faster than from the list itself
                self._tokens += len(ids)
                self._ambiguous = self._ambiguous or end_id in ids
                continue
            if text.skipped is None and not self._ambiguous:
                self._whole += [*self._open, self._end]
                self._lengths.append((self._tokens + 1, text.bytes))
                self._first = self._first or text.name
                documents, tokens = documents + 1, tokens + self._tokens + 1
            else:
                self._flush()
                self._part.skip(text.skipped or AMBIGUOUS, text.name)
            self._open, self._tokens, self._ambiguous = [], 0, False
        self._flush()
        if self._open:
            self._part.write(narrow(np.concatenate(self._open), self._tokenizer))
            self._open = []
        return documents, tokens

    def _flush(self) -> None:
        if self._whole:
            self._part.write(narrow(np.concatenate(self._whole), self._tokenizer))
            self._part.add_documents(self._lengths, first=self._first)
            self._whole, self._lengths = [], []


def narrow(ids: NDArray[np.integer[Any]], tokenizer: TextTokenizer) -> NDArray[Any]:
    """Cast ids to the dtype on disk, none of them changed.

    Raises:
        UserError: if an id lies outside the vocabulary (a plain cast would wrap it silently).
    """
    if len(ids) and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
        raise UserError(
            f"the tokenizer gave ids from {ids.min()} to {ids.max()}, outside its vocabulary of "
            f"{tokenizer.vocab_size}: its tokenizer.json is damaged"
        )
    return ids.astype(tokenizer.dtype)


def _batches(pieces: Iterable[Piece], cuttable: bool, advance: Callable[[int], None]) -> Iterator[Sequence[str | End]]:
    """Stretches of text and the ends of documents, in batches that fit into memory."""
    batch: list[str | End] = []
    characters = 0
    for piece in pieces:
        for text in read_piece(piece, advance, cuttable=cuttable):
            batch.append(text)
            characters += len(text) if isinstance(text, str) else _END_CHARACTERS
            if characters >= _BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
    yield batch


def _bytes_without_a_token(state: dict[str, Any]) -> list[str]:
    """The bytes that a byte-level tokenizer leaves out of a text without a word, by their symbols."""
    model, steps = state["model"], state["pre_tokenizer"] or {"type": None}
    steps = steps["pretokenizers"] if steps["type"] == "Sequence" else [steps]
    if model.get("unk_token") or model.get("byte_fallback") or all(step["type"] != "ByteLevel" for step in steps):
        return []
    symbols = {token["content"] for token in state["added_tokens"]} | set(model["vocab"])
    return [f"{symbol!r}" for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()) if symbol not in symbols]


def _is_cuttable(state: dict[str, Any]) -> bool:
    """Whether a text may be cut between an ASCII letter or digit and a newline without changing its tokens.

    True only for what is known to allow it: no normalizer but NFC (which leaves both characters alone), a
    pre-tokenizer that always separates them, and no added token that could reach across.
    """
    normalizer = state["normalizer"]
    if normalizer is not None and normalizer["type"] != "NFC":
        return False
    for token in state["added_tokens"]:  # special ones are ordinary text here
        if not token["special"] and ("\n" in token["content"] or token["lstrip"] or token["rstrip"]):
            return False
    pre_tokenizer = state["pre_tokenizer"] or {"type": None}
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    separated = False
    for step in steps:
        if step["type"] == "Split":
            if (
                step["pattern"].get("Regex") not in _CUTTABLE_PATTERNS
                or step["behavior"] != "Isolated"
                or step["invert"]
            ):
                return False
            separated = True
        elif step["type"] == "ByteLevel":
            if step["add_prefix_space"]:
                return False
            separated = separated or step["use_regex"]
        elif step["type"] != "Digits":
            return False
    return separated
