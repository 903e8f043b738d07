"""Token ids back to text, while they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


def decode_stream(tokenizer: Tokenizer, prompt: Sequence[int], ids: Iterable[int], end_id: int) -> Iterator[str]:
    """The text of ``ids`` as it follows that of ``prompt``, up to ``end_id``, in pieces of whole characters.

    A character that the last ids leave unfinished is left out.
    """
    stream = DecodeStream(skip_special_tokens=False)
    # the prompt goes in too: what a token looks like depends on those before it, a word's first space above all
    for place, token in enumerate(chain(prompt, ids)):
        if place >= len(prompt) and token == end_id:
            return
        try:
            piece = stream.step(tokenizer, token)
        except Exception:  # noqa: BLE001  # tokenizers 0.23: bytes that are no UTF-8 may change text given out before
            stream = DecodeStream(skip_special_tokens=False)
            piece = stream.step(tokenizer, token)
        if piece and place >= len(prompt):
            yield piece
