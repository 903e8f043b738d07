"""Sharded checkpoints (``torch.distributed.checkpoint``): written, read without trust, and made into one file."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from tst_lightning.errors import UserError

_METADATA = "torch.distributed.checkpoint.metadata"
# all that PyTorch 2.14 writes into .metadata but for the types of numbers
_KNOWN = {
    *((_METADATA, name) for name in ("Metadata", "BytesStorageMetadata", "TensorStorageMetadata", "MetadataIndex")),
    *((_METADATA, name) for name in ("ChunkStorageMetadata", "StorageMeta", "TensorProperties")),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
}


class _MetadataUnpickler(pickle.Unpickler):
    """PyTorch 2.14 unpickles ``.metadata`` whatever it says; nothing foreign is made or called here."""

    def find_class(self, module: str, name: str) -> Any:
        number = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not number and (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f".metadata asks for {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


def check_sharded(path: Path) -> None:
    """Refuse a sharded checkpoint that is not whole, or that would have PyTorch execute what it holds.

    Reads its directory of tensors and the few values beside them; there are no checksums of the tensors.

    Args:
        path: the checkpoint's directory.

    Raises:
        UserError: with the reason.
    """
    try:
        with (path / ".metadata").open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(".metadata holds something else")
        for name, content in _plain_values(path, metadata):
            try:
                torch.load(io.BytesIO(content), weights_only=True)
            except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
                raise pickle.UnpicklingError(f"{name} cannot be read without executing it") from error
    except (OSError, EOFError, ValueError, TypeError, AttributeError, pickle.UnpicklingError) as error:
        raise UserError(
            f"{path} is not a whole checkpoint ({error}): take another one, such as the one before"
        ) from error


def _plain_values(path: Path, metadata: Metadata) -> Iterator[tuple[str, bytes]]:
    """What is no tensor, as written; PyTorch 2.14 reads tensors, but not these, with ``weights_only``."""
    sizes = {file.name: file.stat().st_size for file in path.iterdir()}
    for index, place in metadata.storage_data.items():
        name = str(place.relative_path)
        if name not in sizes:
            raise ValueError(f"{name} is missing")
        if place.transform_descriptors:
            raise ValueError(f"{name} is encoded in a way that is not known here")
        if place.offset < 0 or place.length < 0 or place.offset + place.length > sizes[name]:
            raise ValueError(f"{name} is cut short")
        if isinstance(metadata.state_dict_metadata.get(index.fqn), BytesStorageMetadata):
            with (path / name).open("rb") as file:
                file.seek(place.offset)
                yield index.fqn, file.read(place.length)


def write_shards(
    state: dict[str, Any], path: Path, group: ProcessGroup | None, failures: list[OSError]
) -> Future[Any] | None:
    """Write this rank's tensors; on every rank at once.

    Args:
        state: as the strategy gives it.
        path: a directory for all ranks.
        group: over gloo, of its own, to write in the background from a copy; None to write at once.
        failures: gets what goes wrong with the disk, of whichever rank, on every rank.

    Returns:
        What tells that the background has done it on every rank, see :func:`write_error`.
    """
    try:
        if group is None:
            save(state, checkpoint_id=path)
            return None
        future: Future[Any] = async_save(state, checkpoint_id=path, process_group=group)  # type: ignore[assignment]
        return future
    except CheckpointException as error:
        failures.append(write_error(error))
    return None


def write_error(error: BaseException) -> OSError:
    """What went wrong on some rank's disk; other errors are raised again."""
    if isinstance(error, OSError):
        return error
    if isinstance(error, CheckpointException):
        causes = [cause for cause, _ in error.failures.values()]
        # torch 2.14 complains about its file's length behind the system's own word, which does not leave its rank
        return next((cause for cause in causes if isinstance(cause, OSError)), OSError(str(causes[0])))
    raise error


def consolidate_checkpoint(path: Path, output: Path) -> Path:
    """Make one file, as one process saves it, of a sharded checkpoint: to resume from, to generate or to publish with.

    It needs memory for all of the weights and the optimiser's state, and in between room on the disk for two copies.

    Args:
        path: the checkpoint's directory.
        output: the file; it appears when it is whole.

    Returns:
        ``output``.

    Raises:
        UserError: if there is no whole sharded checkpoint, or ``output`` exists.
    """
    if output.exists():
        raise UserError(f"{output} exists already: choose another --output, or delete it")
    if not path.is_dir():
        raise UserError(f"{path} is no sharded checkpoint, which is a directory (step-NNNNNNNNN.ckpt)")
    check_sharded(path)
    try:
        checkpoint = torch.load(path / "meta.pt", map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"{path} is not a whole checkpoint ({error}): take another one") from error
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = [output.with_name(f"{output.name}.{end}.tmp") for end in ("tensors", "whole")]
    try:
        dcp_to_torch_save(path, temporary[0])
        state = torch.load(temporary[0], map_location="cpu", mmap=True, weights_only=True)
        # FSDP2's and FSDP1's word for it in Lightning 2.6.6
        checkpoint["state_dict"] = state.get("state_dict", state.get("model"))
        names = sorted((key for key in state if key.startswith("optimizer_")), key=lambda key: int(key.split("_")[1]))
        checkpoint["optimizer_states"] = [_numbered(state[name]) for name in names]
        with temporary[1].open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        temporary[1].replace(output)
    finally:
        for file_path in temporary:
            file_path.unlink(missing_ok=True)
    return output


def _numbered(state: dict[str, Any]) -> dict[str, Any]:
    """An optimiser's state by the parameters' numbers, as an optimiser itself saves it, instead of by their names."""
    groups = state["param_groups"]
    numbers = {name: number for number, name in enumerate(name for group in groups for name in group["params"])}
    return {
        "state": {numbers[name]: values for name, values in state.get("state", {}).items()},
        "param_groups": [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups],
    }
