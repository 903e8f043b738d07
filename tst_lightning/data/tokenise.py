"""Tokenizers for a prepared corpus: load or train one, and turn documents into ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tst_lightning.data.corpus import Split, dtype_for
from tst_lightning.data.documents import Document, read_pieces
from tst_lightning.errors import UserError

END_OF_TEXT = "<|endoftext|>"
KNOWN_ENDS_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]")

_BATCH_CHARACTERS = 1 << 22  # an encoded batch takes about 100 times as much memory

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
        cuttable: a text may be encoded in the pieces of
            :func:`~tst_lightning.data.documents.read_pieces` without any change of its tokens.
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


def load_tokenizer(path: Path, end_of_text: str | None = None) -> TextTokenizer:
    """Read a Hugging Face ``tokenizer.json``.

    Args:
        path: the file.
        end_of_text: the token that closes a document; by default the first well-known one that it has.

    Raises:
        UserError: if it cannot be read, draws its tokens at random or has no end-of-text token.
    """
    try:
        tokenizer = Tokenizer.from_file(str(path))
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


def train_tokenizer(documents: Iterable[Document], vocab_size: int, path: Path, advance: Callable[[str], None]) -> None:
    """Train a byte-level BPE tokenizer with exactly ``vocab_size`` tokens and save it.

    ``<|endoftext|>`` has id 0, the 256 bytes follow, so that no text is unknown; no space is added in front.
    The same documents give the same file.

    Args:
        documents: what it learns from.
        vocab_size: at least 257.
        path: where ``tokenizer.json`` is written.
        advance: told of each piece of text as it is read.

    Raises:
        UserError: if the documents are too few for so many tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()

    def texts() -> Iterator[str]:
        for document in documents:
            for piece in read_pieces(document, cuttable=True):
                yield piece
                advance(piece)

    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer=trainer)
    size = tokenizer.get_vocab_size()
    if size != vocab_size:
        raise UserError(
            f"--train-tokenizer {vocab_size}: the training documents repeat too little for more than {size} "
            f"tokens: ask for {size} or fewer, or give more text"
        )
    tokenizer.save(str(path))


@dataclass
class Spooled:
    """What :func:`encode_documents` wrote.

    Attributes:
        split: the counts.
        max_token_id: the largest id written.
        ambiguous: documents left out, because their text holds the end-of-text token and the tokenizer cannot
            write it as ordinary text.
    """

    split: Split
    max_token_id: int
    ambiguous: list[Document] = field(default_factory=list)


def encode_documents(
    documents: Iterable[Document],
    tokenizer: TextTokenizer,
    spool: BinaryIO,
    advance: Callable[[str, int], None],
) -> Spooled:
    """Append the ids of every document, each closed by the end-of-text token, to ``spool`` as raw integers.

    Args:
        documents: in order.
        tokenizer: what encodes them.
        spool: an empty file, open for writing.
        advance: told of each piece of text and of the tokens it became.

    Raises:
        UserError: if a file changed since it was checked, or an id lies outside the vocabulary.
    """
    item_bytes = np.dtype(tokenizer.dtype).itemsize
    end = np.array([tokenizer.end_of_text_id], dtype=tokenizer.dtype)
    spooled = Spooled(Split(0, 0, 0), 0)
    count = size = max_id = 0  # of the documents written; max_id of the present one
    start = 0  # where the present document starts in the spool
    ambiguous = False
    for batch in _batches(documents, tokenizer.cuttable):
        texts = [text for _, text in batch if text is not None]
        encodings = iter(tokenizer.tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        for document, text in batch:
            if text is not None:
                ids = np.asarray(next(encodings).ids, dtype=np.int64)
                advance(text, len(ids))
                max_id = max(max_id, int(ids.max(initial=0)))
                ambiguous = ambiguous or bool((ids == tokenizer.end_of_text_id).any())
                spool.write(narrow(ids, tokenizer).tobytes())
                continue
            if ambiguous:
                spool.seek(start)
                spool.truncate()
                spooled.ambiguous.append(document)
            else:
                spool.write(end.tobytes())
                advance("", 1)
                count, size = count + 1, size + document.bytes
                spooled.max_token_id = max(spooled.max_token_id, max_id, tokenizer.end_of_text_id)
            start, max_id, ambiguous = spool.tell(), 0, False
    spooled.split = Split(documents=count, tokens=start // item_bytes, bytes=size)
    return spooled


def narrow(ids: NDArray[np.int64], tokenizer: TextTokenizer) -> NDArray[Any]:
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


def _batches(documents: Iterable[Document], cuttable: bool) -> Iterator[Sequence[tuple[Document, str | None]]]:
    """Pieces of text in batches that fit into memory; None marks a document's end."""
    batch: list[tuple[Document, str | None]] = []
    characters = 0
    for document in documents:
        for piece in read_pieces(document, cuttable=cuttable):
            batch.append((document, piece))
            characters += len(piece)
            if characters >= _BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
        batch.append((document, None))
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
