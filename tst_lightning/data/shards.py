"""What one of many machines has tokenised: a directory that is no corpus until all of them are merged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tst_lightning.data.corpus import SHARD, TOKENIZER, file_sha256
from tst_lightning.data.parts import Part, read_part
from tst_lightning.errors import UserError

PARTS = "parts"
_FORMAT = 1


@dataclass(frozen=True)
class Shard:
    """A finished shard.

    Attributes:
        directory: where it lies.
        index: its number, from 0.
        count: of all shards.
        total_parts: parts of all shards.
        identity: what must be the same in all of them.
        parts: its own.
    """

    directory: Path
    index: int
    count: int
    total_parts: int
    identity: dict[str, Any]
    parts: list[Part]


def finish_shard(
    directory: Path, parts: Sequence[Part], identity: dict[str, Any], shard: Sequence[int], total_parts: int
) -> None:
    """Move the parts into ``directory``, which holds ``tokenizer.json`` only, and vouch for them."""
    if parts:
        parts[0].directory.rename(directory / PARTS)
    else:
        (directory / PARTS).mkdir()
    state = {
        "format": _FORMAT,
        "shard": [*shard],
        "total_parts": total_parts,
        "parts": [part.number for part in parts],
        "identity": identity,
    }
    unfinished = directory / f"{SHARD}.tmp"
    unfinished.write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(directory / SHARD)


def read_shards(directories: Sequence[Path]) -> list[Shard]:
    """All shards of one input, in their order; their tokens are not read.

    Raises:
        UserError: naming every fault at once.
    """
    shards: list[Shard] = []
    faults: list[str] = []
    for directory in directories:
        try:
            shards.append(_read_shard(directory))
        except UserError as error:
            faults += error.faults
    if faults or not shards:
        raise UserError(faults or ["no shard is given"])
    first = shards[0]
    for shard in shards[1:]:
        faults += [
            f"{shard.directory} and {first.directory} are not shards of one input: they {difference}"
            for difference in _differences(shard.identity, first.identity)
        ]
        if shard.count != first.count:
            faults.append(f"{shard.directory} is one of {shard.count} shards, {first.directory} one of {first.count}")
        elif shard.total_parts != first.total_parts and shard.identity == first.identity:
            faults.append(f"{shard.directory} and {first.directory} were cut into parts by different releases")
    if not faults:
        found = [shard.index for shard in shards]
        for index in range(first.count):
            if found.count(index) > 1:
                twice = [str(shard.directory) for shard in shards if shard.index == index]
                faults.append(f"shard {index} of {first.count} is given more than once: {', '.join(twice)}")
            elif index not in found:
                faults.append(
                    f"shard {index} of {first.count} is missing: prepare it with --shard {index}/{first.count}"
                )
    if not faults:
        numbers = sorted(part.number for shard in shards for part in shard.parts)
        if numbers != list(range(first.total_parts)):
            faults.append(f"the shards hold {len(numbers)} parts, and {first.total_parts} were planned")
    if faults:
        raise UserError(faults)
    return sorted(shards, key=lambda shard: shard.index)


def _differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    known = ("inputs_sha256", "tokenizer_sha256", "end_of_text")
    found = {name for name in known if one.get(name) != other.get(name)}
    differences = []
    if "inputs_sha256" in found:
        differences.append("were made of other files")
    if "tokenizer_sha256" in found:
        differences.append("have other tokenizers")
    if "end_of_text" in found:
        differences.append(f"end documents with other tokens ({one.get('end_of_text')} and {other.get('end_of_text')})")
    return differences


def _read_shard(directory: Path) -> Shard:
    path = directory / SHARD
    if not path.is_file():
        raise UserError(f"{directory} is no shard (it has no {SHARD}): make one by `tst-lightning prepare --shard I/N`")
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        if state["format"] != _FORMAT:
            raise UserError(
                f"{path} has format {state['format']!r}, and this release reads {_FORMAT}: prepare it again"
            )
        index, count = state["shard"]
        found = {number: read_part(directory / PARTS, number) for number in state["parts"]}
        identity = dict(state["identity"])
        total_parts = int(state["total_parts"])
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}): prepare this shard again") from error
    missing = [str(number) for number, part in found.items() if part is None]
    if missing:
        raise UserError(f"{directory} misses its parts {', '.join(missing)}: prepare this shard again")
    tokenizer = directory / TOKENIZER
    if not tokenizer.is_file() or file_sha256(tokenizer) != identity.get("tokenizer_sha256"):
        raise UserError(f"{tokenizer} is missing or not the file that made these tokens: prepare this shard again")
    return Shard(directory, index, count, total_parts, identity, [part for part in found.values() if part is not None])
