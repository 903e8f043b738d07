"""How many bytes of text each id of a tokenizer stands for."""

from __future__ import annotations

import json

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, pre_tokenizers


def byte_lengths(tokenizer: Tokenizer, end_of_text_id: int) -> NDArray[np.int64] | None:
    """UTF-8 bytes of the text that each id decodes to, special tokens and end-of-text being no text.

    Returns:
        One number for each id up to the largest; None unless the tokenizer is a byte-level BPE that adds no space
        in front of a text, whose tokens say it exactly.
    """
    state = json.loads(tokenizer.to_str())
    pre_tokenizer = state["pre_tokenizer"] or {"type": None}
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    byte_level = [step for step in steps if step["type"] == "ByteLevel"]
    plain = (state["decoder"] or {}).get("type") == "ByteLevel" and state["normalizer"] is None
    if state["model"]["type"] != "BPE" or not byte_level or not plain or any(s["add_prefix_space"] for s in byte_level):
        return None
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    lengths = np.zeros(max(vocabulary.values()) + 1, np.int64)
    for token, index in state["model"]["vocab"].items():
        # one symbol is one byte; a token with any other symbol is decoded as it stands
        lengths[index] = len(token) if alphabet.issuperset(token) else len(token.encode())
    for added in state["added_tokens"]:
        lengths[added["id"]] = 0 if added["special"] else len(added["content"].encode())
    lengths[end_of_text_id] = 0
    return lengths
