"""What to read of token files of other training stacks, and what is wrong with them, before any work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tst_lightning.data.corpus import SIDECAR
from tst_lightning.data.foreign import litdata_tokens, llmc, megatron, nanogpt
from tst_lightning.data.foreign.stream import Stream
from tst_lightning.errors import UserError

FORMATS: dict[str, Callable[[Path], list[Stream]]] = {
    "nanogpt": nanogpt.streams,
    "llm.c": llmc.streams,
    "megatron": megatron.streams,
    "litdata": litdata_tokens.streams,
}


def plan_streams(inputs: Sequence[Path], form: str = "auto") -> list[Stream]:
    """What to read, in the order of ``inputs``. The last stream is closed.

    Args:
        inputs: files, LitData directories or Megatron-LM's path without the ending.
        form: a name of :data:`FORMATS`, or ``auto`` to go by what the files say.

    Raises:
        UserError: naming every fault of every input at once.
    """
    faults: list[str] = []
    found: list[Stream] = []
    for path in _each_once(inputs):
        try:
            if form == "nanogpt" and path.is_file() and (other := _with_signature(path)) is not None:
                raise UserError(f"{path} is a file of {other}: give --from {other}")
            found += FORMATS[detect(path) if form == "auto" else form](path)
        except UserError as error:
            faults += error.faults
        except OSError as error:
            faults.append(f"{path} cannot be read ({error.strerror})")
    formats = sorted({stream.format for stream in found})
    if len(formats) > 1:
        faults.append(f"the inputs are of the formats {' and '.join(formats)}: import them one after the other")
    if faults:
        raise UserError(faults)
    return [*found[:-1], replace(found[-1], closed=True)]


def detect(path: Path) -> str:
    """The format of an input. A ``.bin`` without any known signature is taken for nanoGPT's.

    Raises:
        UserError: if it is none that can be told.
    """
    ways = f"name its format with --from ({', '.join(FORMATS)})"
    if path.is_dir():
        if (path / SIDECAR).is_file():
            raise UserError(f"{path} is a prepared corpus already: train on it as it is")
        if (path / "index.json").is_file():
            return "litdata"
        inside = sorted(file.name for file in path.iterdir() if file.suffix in (".bin", ".idx"))
        has = f"it holds {', '.join(inside[:4])}{', ...' if len(inside) > 4 else ''}: name them" if inside else ways
        raise UserError(f"{path} is a folder without LitData's index.json: {has}")
    if (form := _with_signature(path)) is not None:
        return form
    if not path.exists():
        raise UserError(f"{path} does not exist")
    if not path.is_file():
        raise UserError(f"{path} is neither a file nor a folder")
    if path.suffix == ".bin":
        return "nanogpt"
    raise UserError(f"{path} begins as no known token file does: {ways}")


def _with_signature(path: Path) -> str | None:
    """The format that a file's first bytes, or those of its index, name; None if they name none."""
    if megatron.is_index(Path(f"{megatron.base(path)}.idx")) or path.suffix == ".idx":
        return "megatron"
    return None if llmc.magic(path) is None else "llm.c"


def _each_once(inputs: Sequence[Path]) -> list[Path]:
    """The inputs in order; both files of a Megatron-LM data set, as a glob names them, are one."""
    pairs = {path for path in inputs if path.suffix == ".bin"}
    return [path for path in inputs if not (path.suffix == ".idx" and path.with_suffix(".bin") in pairs)]
