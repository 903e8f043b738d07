"""Hugging Face data sets: a column of text in the Arrow files that `datasets` keeps.

`datasets` fetches and converts a data set, once. What is read are its Arrow files by rows, so the order is that of
the data set, and no worker asks the network for anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from tst_lightning.data.formats.columns import column_fault, read_cells
from tst_lightning.data.pieces import PIECE_BYTES, End, Meter, Piece
from tst_lightning.errors import UserError


def plan_dataset(name: str, *, config: str | None = None, split: str = "train", field: str = "text") -> list[Piece]:
    """Ranges of rows of a Hugging Face data set, in its order.

    Args:
        name: of a data set on the hub, or a folder that ``save_to_disk`` wrote.
        config: which of its configurations.
        split: which of its splits; slices (``train[:10%]``) are refused.
        field: the column that holds the text.

    Raises:
        UserError: if `datasets` is not installed, or the data set cannot be had, or has no such column.
    """
    import pyarrow as pa

    dataset = _load(name, config, split)
    if fault := column_fault(f"--hf {name}", dataset.features.arrow_schema, field):
        raise UserError(fault)
    paths = [os.path.abspath(file["filename"]) for file in dataset.cache_files]
    try:
        rows = [sum(batch.num_rows for batch in _batches(path)) for path in paths]
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"--hf {name} cannot be read ({error}): fetch it again") from error
    if sum(rows) != dataset.num_rows:
        raise UserError(
            f"--hf-split {split} of {name} is {dataset.num_rows:,} rows of {sum(rows):,}, a selection: "
            "name a whole split (--max-tokens takes the beginning of one)"
        )
    return [piece for path, count in zip(paths, rows, strict=True) for piece in _pieces(path, count, field)]


def read_dataset(piece: Piece, advance: Callable[[int], None], *, cuttable: bool) -> Iterator[str | End]:
    """The documents in the rows of a piece.

    Raises:
        UnreadableInput: if the data set's file is damaged, or not there any more.
    """
    rows = piece.stop - piece.start
    yield from read_cells(piece, _arrays(piece), piece.start, rows, Meter(piece, advance), cuttable=cuttable)


def _pieces(path: str, rows: int, field: str) -> list[Piece]:
    size = os.path.getsize(path)
    extent = max(rows * PIECE_BYTES // max(size, 1), 1)
    pieces = []
    for start in range(0, rows, extent):
        stop = min(start + extent, rows)
        share = size * stop // rows - size * start // rows
        pieces.append(Piece(path, "hf", "none", start, stop, share, field))
    return pieces


def _arrays(piece: Piece) -> Iterator[Any]:
    row = 0
    for batch in _batches(piece.path):
        if row >= piece.stop:
            return
        first, last = max(piece.start - row, 0), min(piece.stop - row, batch.num_rows)
        if first < last:
            yield batch.column(piece.field).slice(first, last - first)
        row += batch.num_rows


def _batches(path: str) -> Iterator[Any]:
    import pyarrow as pa

    with pa.memory_map(path) as source, pa.ipc.open_stream(source) as stream:
        yield from stream


def _load(name: str, config: str | None, split: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UserError("--hf needs the package datasets: pip install 'tst-lightning[hf]'") from error
    if not os.path.isdir(name):
        try:
            return datasets.load_dataset(name, config, split=split)
        except Exception as error:  # the hub, the network, the cache and each format have errors of their own
            raise UserError(
                f"--hf {name} cannot be loaded ({type(error).__name__}: {error}): "
                "check the name, --hf-config and --hf-split, and that the network or a cached copy is there"
            ) from error
    if config is not None:
        raise UserError(f"--hf-config {config} belongs to a data set of the hub: {name} is a folder")
    try:
        saved = datasets.load_from_disk(name)
    except Exception as error:  # as above
        raise UserError(
            f"--hf {name} is no folder that save_to_disk wrote ({type(error).__name__}: {error}): "
            "name one, or give the files of the folder as INPUT"
        ) from error
    if isinstance(saved, datasets.Dataset):
        if split not in ("train", str(saved.split)):
            raise UserError(f"--hf-split {split}: {name} holds one split only ({saved.split or 'unnamed'})")
        return saved
    if split not in saved:
        raise UserError(f"--hf-split {split}: {name} has the splits {', '.join(saved)}")
    return saved[split]
