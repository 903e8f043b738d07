"""Hold every token of a prepared corpus against its sidecar, chunk by chunk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tst_lightning.data.corpus import CHECKSUMS, ITEM_BYTES, TOKENIZER, Corpus
from tst_lightning.data.stores import MissingObject, StoreError, StorePath


@dataclass
class Samples:
    """Collects how some documents begin, as the tokens of a corpus go by.

    Attributes:
        wanted: numbers of documents, over all splits in order, ascending.
        length: tokens to keep of each.
        end_of_text_id: what ends a document.
        found: the split of each document and its first tokens, end-of-text left out.
    """

    wanted: list[int]
    length: int
    end_of_text_id: int
    found: dict[int, tuple[str, list[int]]] = field(default_factory=dict)
    _open: int | None = None  # the document whose first tokens are not complete yet

    def take(self, split: str, document: int, ids: NDArray[Any], ends: NDArray[np.int64]) -> None:
        """See the next tokens.

        Args:
            split: that they belong to.
            document: number of the document of ``ids[0]``.
            ids: the tokens.
            ends: places of the end-of-text tokens among them.
        """
        if self._open is not None:
            self._add(self._open, ids)
        for number in self.wanted:
            if number in self.found or not document <= number <= document + len(ends):
                continue
            start = 0 if number == document else int(ends[number - document - 1]) + 1
            if start < len(ids):
                self.found[number] = (split, [])
                self._add(number, ids[start:])

    def _add(self, number: int, ids: NDArray[Any]) -> None:
        kept = self.found[number][1]
        more = [int(index) for index in ids[: self.length - len(kept)]]
        ended = self.end_of_text_id in more
        kept += more[: more.index(self.end_of_text_id)] if ended else more
        self._open = None if ended or len(kept) == self.length else number


@dataclass
class _SplitSums:
    """What the tokens of a split come to."""

    digest: Any = field(default_factory=hashlib.sha256)
    ends: int = 0
    max_id: int = -1
    last_id: int = -1
    whole: bool = True  # every chunk was read and found right


def chunk_list(corpus: Corpus, split: str) -> list[tuple[str, list[int]]] | None:
    """File name and record lengths of every chunk by LitData's index; None if that cannot be read."""
    try:
        index = json.loads((corpus.split_directory(split) / "index.json").read_bytes())
        return [(str(chunk["filename"]), [int(n) for n in chunk["temporal_frames"]]) for chunk in index["chunks"]]
    except StoreError as error:
        if isinstance(error, MissingObject):
            return None
        raise
    except (OSError, ValueError, KeyError, TypeError):
        return None


def corpus_faults(corpus: Corpus, samples: Samples, advance: Callable[[int], None]) -> list[str]:
    """Everything that is wrong with a corpus, one sentence for each fault; empty if nothing is.

    Args:
        corpus: whose sidecar was read; its files need not have been checked.
        samples: are collected on the way.
        advance: told of tokens as they are checked.

    Raises:
        StoreError: if a store cannot be read.
    """
    faults = corpus.file_faults()
    sums = _read_checksums(corpus, faults)
    _hold_against_sums(corpus, TOKENIZER, sums, faults)
    named = {TOKENIZER}
    unknown: list[str] = []  # folders of which nobody can say what should be in them
    sums_of: dict[str, _SplitSums] = {}
    before = 0  # documents of the splits before
    for name, split in corpus.splits.items():
        chunks = chunk_list(corpus, name)
        _hold_against_sums(corpus, f"{name}/index.json", sums, faults)
        if chunks is None:
            unknown.append(f"{name}/")  # file_faults says why
            continue
        named |= {f"{name}/index.json", *(f"{name}/{filename}" for filename, _ in chunks)}
        found = sums_of[name] = _SplitSums()
        for filename, frames in chunks:
            wrong = _check_chunk(corpus, f"{name}/{filename}", frames, sums, found, samples, name, before)
            found.whole = found.whole and wrong == []
            faults += wrong or []
            advance(sum(frames))
        if found.whole:
            faults += _split_faults(corpus, name, found)
        before += split.documents
    for name in sorted(name for name in set(sums or ()) - named if not name.startswith(tuple(unknown))):
        faults.append(f"{corpus.directory / CHECKSUMS} lists {name}, which is no file of this corpus")
    largest = max((found.max_id for found in sums_of.values()), default=-1)
    if len(sums_of) == len(corpus.splits) and all(s.whole for s in sums_of.values()) and largest != corpus.max_token_id:
        faults.append(f"{corpus.directory}: the largest id is {largest}, but the sidecar says {corpus.max_token_id}")
    return faults


def _check_chunk(
    corpus: Corpus,
    name: str,
    frames: list[int],
    sums: dict[str, str] | None,
    found: _SplitSums,
    samples: Samples,
    split: str,
    before: int,
) -> list[str] | None:
    """What is wrong with a chunk; None if it cannot be read, which was said before."""
    path = corpus.directory / name
    try:
        content = path.read_bytes()
    except MissingObject:
        return None
    except StoreError:
        raise
    except FileNotFoundError:
        return None
    except OSError as error:
        return [f"{path} cannot be read ({error.strerror})"]
    item_bytes = ITEM_BYTES[corpus.dtype]
    header = 4 * (2 + len(frames))
    places = header + np.cumsum([0, *(4 + n * item_bytes for n in frames)])
    if len(content) != places[-1]:
        return None
    faults = _sum_faults(path, name, hashlib.sha256(content).hexdigest(), sums)
    if [len(frames), *places] != np.frombuffer(content, "<u4", 2 + len(frames)).tolist():
        faults.append(f"{path}: its header does not say where the index's {len(frames):,} records lie")
    for number, (place, length) in enumerate(zip(places[:-1].tolist(), frames, strict=True)):
        stated = int.from_bytes(content[place : place + 4], "little")
        if stated != length:
            faults.append(f"{path}: record {number} says that it has {stated:,} tokens, the index says {length:,}")
        ids = np.frombuffer(content, np.dtype(corpus.dtype).newbyteorder("<"), length, place + 4)
        faults += _id_faults(corpus, f"{path}: record {number}", ids)
        ends = np.flatnonzero(ids == corpus.end_of_text_id)
        samples.take(split, before + found.ends, ids, ends)
        found.digest.update(ids)
        found.ends += len(ends)
        if length:
            found.max_id = max(found.max_id, int(ids.max()))
            found.last_id = int(ids[-1])
    return faults


def _id_faults(corpus: Corpus, where: str, ids: NDArray[Any]) -> list[str]:
    allowed, says = (
        (corpus.max_token_id, f"more than the largest id of {corpus.max_token_id} in the sidecar")
        if not len(ids) or int(ids.max()) < corpus.vocab_size
        else (corpus.vocab_size - 1, f"outside the vocabulary of {corpus.vocab_size:,}")
    )
    wrong = (ids < 0) | (ids > allowed)
    count = int(wrong.sum())
    if not count:
        return []
    place = int(wrong.argmax())
    more = f" (and {count - 1:,} more)" if count > 1 else ""
    return [f"{where}: token {place:,} is {ids[place]}{more}, {says}"]


def _split_faults(corpus: Corpus, name: str, found: _SplitSums) -> list[str]:
    split, where = corpus.splits[name], corpus.split_directory(name)
    faults = []
    if found.digest.hexdigest() != split.sha256:
        faults.append(f"{where}: its tokens are not those that the sidecar vouches for (the hash differs)")
    if found.ends != split.documents:
        faults.append(
            f"{where} holds {found.ends:,} end-of-text tokens, but the sidecar says {split.documents:,} documents"
        )
    if found.last_id != corpus.end_of_text_id:
        faults.append(f"{where}: its last document is not closed by an end-of-text token")
    return faults


def _read_checksums(corpus: Corpus, faults: list[str]) -> dict[str, str] | None:
    """Hashes by file name; None, with the reason among ``faults``, if there are none."""
    path = corpus.directory / CHECKSUMS
    try:
        lines = path.read_bytes().decode().splitlines()
        pairs = [line.split("  ", 1) for line in lines]
        return {name: digest for digest, name in pairs}
    except (FileNotFoundError, MissingObject):
        faults.append(f"{path} is missing")
    except StoreError:
        raise
    except (OSError, ValueError) as error:
        faults.append(f"{path} cannot be read as lines of a hash and a name ({error})")
    return None


def _hold_against_sums(corpus: Corpus, name: str, sums: dict[str, str] | None, faults: list[str]) -> None:
    path: Path | StorePath = corpus.directory / name
    try:
        content = path.read_bytes()
    except (FileNotFoundError, MissingObject):
        return  # file_faults says so
    faults += _sum_faults(path, name, hashlib.sha256(content).hexdigest(), sums)


def _sum_faults(path: Path | StorePath, name: str, digest: str, sums: dict[str, str] | None) -> list[str]:
    if sums is None or sums.get(name) == digest:
        return []
    if name not in sums:
        return [f"{path} is not listed in {CHECKSUMS}"]
    return [f"{path} is damaged: its hash is not the one in {CHECKSUMS}"]
