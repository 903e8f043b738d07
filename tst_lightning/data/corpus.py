"""A prepared corpus, on disk or in a store, and the sidecar that vouches for it. Light until it is loaded.

A prepared directory holds ``train/`` and ``val/`` (LitData directories whose records are runs of tokens, so
that each split is one flat token stream), ``tokenizer.json`` and the sidecar ``corpus.json``, written last: a
directory without a valid sidecar is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tst_lightning.data.stores import MissingObject, StoreError, StorePath, locate
from tst_lightning.errors import UserError

FORMAT_VERSION = 2
RECORD_TOKENS = 2**20
SIDECAR = "corpus.json"
CHECKSUMS = "SHA256SUMS"
SHARD = "shard.json"
TOKENIZER = "tokenizer.json"
SPLITS = ("train", "val")
ITEM_BYTES = {"uint16": 2, "int32": 4}

_NUMPY_NAMES = {"uint16": "<u2", "int32": "<i4"}
_KEYS: dict[str, type] = {
    "format_version": int,
    "tokenizer_sha256": str,
    "vocab_size": int,
    "end_of_text": str,
    "end_of_text_id": int,
    "max_token_id": int,
    "dtype": str,
    "record_tokens": int,
    "splits": dict,
}
_AGAIN = "run `tst-lightning prepare` again into another directory"


@dataclass(frozen=True)
class Split:
    """What one split holds.

    Attributes:
        documents: number of documents.
        tokens: number of tokens, the end-of-text token of every document included.
        bytes: UTF-8 bytes of text, end-of-text tokens not counted; None where only the tokens are known.
        sha256: hash of the flat token stream, in the corpus's dtype, little-endian: what identifies the text.
    """

    documents: int
    tokens: int
    bytes: int | None
    sha256: str


@dataclass(frozen=True)
class Corpus:
    """A prepared directory, as its sidecar states it.

    Attributes:
        directory: where it lies: a local path, or one in a store.
        tokenizer_sha256: hash of ``tokenizer.json``.
        vocab_size: the least vocabulary that a model needs: the tokenizer's largest id plus one.
        end_of_text: the token that closes every document.
        end_of_text_id: its id.
        max_token_id: the largest id that occurs in the splits.
        dtype: ``uint16`` or ``int32``.
        record_tokens: tokens a record, all but a split's last.
        splits: ``train`` and ``val``.
    """

    directory: Path | StorePath
    tokenizer_sha256: str
    vocab_size: int
    end_of_text: str
    end_of_text_id: int
    max_token_id: int
    dtype: str
    record_tokens: int
    splits: dict[str, Split]

    @classmethod
    def load(cls, directory: str | os.PathLike[str], *, check_files: bool = True) -> Corpus:
        """Read the sidecar of ``directory``, a path or a URL, and hold the files against it, without reading a token.

        Args:
            directory: the prepared directory.
            check_files: see that :meth:`file_faults` finds none.

        Raises:
            UserError: naming every fault at once.
        """
        try:
            corpus = cls._load(locate(directory))
            faults = corpus.file_faults() if check_files else []
        except StoreError as error:  # before anything is done, it is the user's turn
            raise UserError(str(error)) from error
        if faults:
            raise UserError(f"{fault}: {_AGAIN}" for fault in faults)
        return corpus

    @classmethod
    def _load(cls, directory: Path | StorePath) -> Corpus:
        sizes = _sizes(directory)
        if sizes is None:
            raise UserError(f"{directory}: no such directory: run `tst-lightning prepare` to make it")
        sidecar = directory / SIDECAR
        if SHARD in sizes:
            raise UserError(f"{directory} is one shard of a corpus: put all of them together with tst-lightning merge")
        if SIDECAR not in sizes:
            raise UserError(f"{directory} is not a prepared directory (it has no {SIDECAR}): run tst-lightning prepare")
        try:
            state = json.loads(sidecar.read_bytes())
        except StoreError:
            raise
        except (OSError, ValueError) as error:
            raise UserError(f"{sidecar} cannot be read ({error}): {_AGAIN}") from error
        version = state.get("format_version") if isinstance(state, dict) else None
        if version != FORMAT_VERSION:
            raise UserError(f"{sidecar}: format_version={version!r}, but this release reads {FORMAT_VERSION}: {_AGAIN}")
        faults = _state_faults(state)
        if faults:
            raise UserError(f"{sidecar}: {fault}: {_AGAIN}" for fault in faults)
        splits = {name: Split(**split) for name, split in state["splits"].items()}
        values = {name: value for name, value in state.items() if name not in ("format_version", "splits")}
        return cls(directory=directory, splits=splits, **values)

    def save(self) -> None:
        """Write the sidecar, atomically. The other files must be complete: a sidecar vouches for them."""
        state = {
            "format_version": FORMAT_VERSION,
            **{name: getattr(self, name) for name in _KEYS if name not in ("format_version", "splits")},
            "splits": {name: vars(split) for name, split in self.splits.items()},
        }
        assert isinstance(self.directory, Path), "a corpus is made on disk, and published then"
        unfinished = self.directory / f"{SIDECAR}.tmp"
        with unfinished.open("w", encoding="utf-8") as file:
            file.write(json.dumps(state, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(self.directory / SIDECAR)

    def split_directory(self, name: str) -> Path | StorePath:
        """The LitData directory of split ``train`` or ``val``."""
        assert name in self.splits, name
        return self.directory / name

    @property
    def tokenizer_path(self) -> Path | StorePath:
        """The Hugging Face ``tokenizer.json`` that made the tokens."""
        return self.directory / TOKENIZER

    def file_faults(self) -> list[str]:
        """What is wrong with the files, as far as it shows without reading a token; one sentence for each fault.

        Checked are the tokenizer's hash, and for each split its index (layout, dtype, lengths of the records)
        and that each chunk file exists in its full size.
        """
        faults = []
        try:
            tokenizer_sha256 = hashlib.sha256(self.tokenizer_path.read_bytes()).hexdigest()
        except (FileNotFoundError, MissingObject):
            faults.append(f"{self.tokenizer_path} is missing")
        else:
            if tokenizer_sha256 != self.tokenizer_sha256:
                faults.append(f"{self.tokenizer_path} is not the file that made these tokens (its hash differs)")
        for name, split in self.splits.items():
            faults += split_faults(
                self.split_directory(name),
                tokens=split.tokens,
                record_tokens=self.record_tokens,
                dtype=self.dtype,
            )
        return faults


def split_faults(directory: Path | StorePath, *, tokens: int, record_tokens: int, dtype: str) -> list[str]:
    """Hold a LitData directory against what it should contain, reading its index and its files' sizes only.

    Args:
        directory: with LitData's ``index.json`` and chunk files.
        tokens: tokens that it must hold in all.
        record_tokens: tokens of every record but the last.
        dtype: ``uint16`` or ``int32``.

    Returns:
        One sentence for each fault; empty if there is none.
    """
    index_path = directory / "index.json"
    sizes = _sizes(directory)
    if sizes is None:
        return [f"{directory} is missing"]
    if index_path.name not in sizes:
        return [f"{index_path} is missing"]
    try:
        index = json.loads(index_path.read_bytes())
        found_dtype = index["config"]["temporal_schema"]["fields"]["tokens"]["dtype"]
        chunks = [(str(chunk["filename"]), list(map(int, chunk["temporal_frames"]))) for chunk in index["chunks"]]
    except StoreError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"{index_path} is not the index of token records ({type(error).__name__}: {error})"]

    faults = []
    if found_dtype != _NUMPY_NAMES[dtype]:
        faults.append(f"{index_path} says dtype {found_dtype}, not {_NUMPY_NAMES[dtype]}")
    records = [frames for _, frames_of_chunk in chunks for frames in frames_of_chunk]
    expected = -(-tokens // record_tokens)
    if sum(records) != tokens or len(records) != expected:
        faults.append(
            f"{index_path} lists {sum(records):,} tokens in {len(records):,} records, not {tokens:,} in {expected:,}"
        )
    elif any(frames != record_tokens for frames in records[:-1]):
        faults.append(f"{index_path} lists records that are not of {record_tokens:,} tokens")
    for filename, frames_of_chunk in chunks:
        # A chunk is its record count, the records' boundaries, then for each record its length and tokens.
        header = 4 * (2 + len(frames_of_chunk))
        size = header + sum(4 + frames * ITEM_BYTES[dtype] for frames in frames_of_chunk)
        chunk_path = directory / filename
        if filename not in sizes:
            faults.append(f"{chunk_path} is missing")
        elif sizes[filename] != size:
            faults.append(f"{chunk_path} has {sizes[filename]:,} bytes, not {size:,}")
    return faults


def _sizes(directory: Path | StorePath) -> dict[str, int] | None:
    """The files in ``directory`` and their sizes, or None if there is no such directory."""
    if isinstance(directory, StorePath):
        return directory.sizes() or None
    if not directory.is_dir():
        return None
    return {path.name: path.stat().st_size for path in directory.iterdir() if path.is_file()}


def dtype_for(vocab_size: int) -> str:
    """The smallest dtype of a prepared corpus that holds every id below ``vocab_size``."""
    return "uint16" if vocab_size <= 2**16 else "int32"


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _state_faults(state: Mapping[str, Any]) -> list[str]:
    """Everything that is wrong with the sidecar's values."""
    faults = _key_faults(state, _KEYS, "")
    if faults:
        return faults
    if set(state["splits"]) != set(SPLITS):
        faults.append(f"splits={sorted(state['splits'])} must be {list(SPLITS)}")
    keys: dict[str, type | tuple[type, ...]] = {
        "documents": int,
        "tokens": int,
        "bytes": (int, type(None)),
        "sha256": str,
    }
    for name, split in state["splits"].items():
        if not isinstance(split, dict):
            faults.append(f"splits.{name} must hold {', '.join(keys)}")
            continue
        wrong = _key_faults(split, keys, f"splits.{name}.")
        faults += wrong or [
            f"splits.{name}.{key}={split[key]} must be at least 1"
            for key in ("documents", "tokens", "bytes")
            if split[key] is not None and split[key] < 1
        ]
    if state["dtype"] not in ITEM_BYTES:
        faults.append(f"dtype={state['dtype']!r} must be one of {', '.join(ITEM_BYTES)}")
    elif state["dtype"] == "uint16" and dtype_for(state["vocab_size"]) != "uint16":
        faults.append(f"dtype={state['dtype']} is too small for vocab_size={state['vocab_size']}")
    if state["record_tokens"] < 1:
        faults.append(f"record_tokens={state['record_tokens']} must be at least 1")
    for key in ("end_of_text_id", "max_token_id"):
        if not 0 <= state[key] < state["vocab_size"]:
            faults.append(f"{key}={state[key]} must lie in [0, vocab_size={state['vocab_size']})")
    return faults


def _key_faults(state: Mapping[str, Any], keys: Mapping[str, type | tuple[type, ...]], prefix: str) -> list[str]:
    faults = [f"{prefix}{key} is missing" for key in keys if key not in state]
    faults += [f"{prefix}{key} is unknown" for key in state if key not in keys]
    for key, kind in keys.items():
        kinds = kind if isinstance(kind, tuple) else (kind,)
        # bool is an int to isinstance
        if key in state and type(state[key]) not in kinds:
            names = " or ".join("null" if each is type(None) else each.__name__ for each in kinds)
            faults.append(f"{prefix}{key}={state[key]!r} must be of type {names}")
    return faults
