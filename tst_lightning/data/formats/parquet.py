"""Parquet files: a column of text, read row group by row group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

from tst_lightning.data.formats.blocks import unreadable
from tst_lightning.data.formats.columns import column_fault, read_cells
from tst_lightning.data.pieces import PIECE_BYTES, End, Meter, Piece

_BATCH_BYTES = 1 << 23
_BATCH_ROWS = 1 << 10
_READ_BYTES = 1 << 20


def plan_parquet(path: str, field: str) -> list[Piece] | str:
    """Runs of row groups of a Parquet file, or what is wrong with it."""
    import pyarrow as pa

    try:
        with closing(_open(path)) as file:
            if fault := column_fault(path, file.schema_arrow, field):
                return fault
            sizes = [_column(file, group, field).total_compressed_size for group in range(file.num_row_groups)]
    except (pa.ArrowException, OSError) as error:
        return f"{path} cannot be read as Parquet ({error}): fetch it again, or leave it out"
    pieces: list[Piece] = []
    start = size = 0
    for stop, group_bytes in enumerate(sizes, 1):
        size += group_bytes
        if size >= PIECE_BYTES or stop == len(sizes):
            pieces.append(Piece(path, "parquet", "none", start, stop, size, field))
            start, size = stop, 0
    return pieces


def read_parquet(piece: Piece, advance: Callable[[int], None], *, cuttable: bool) -> Iterator[str | End]:
    """The documents in the row groups of a piece.

    Raises:
        UnreadableInput: if the file changed since the work was planned, or is damaged.
    """
    import pyarrow as pa

    assert piece.field is not None
    groups = range(piece.start, piece.stop)
    try:
        file = _open(piece.path)
    except (pa.ArrowException, OSError) as error:
        raise unreadable(piece.path, error) from error
    with closing(file):
        if file.num_row_groups < piece.stop:
            raise unreadable(piece.path, OSError(f"{file.num_row_groups} row groups, {piece.stop} expected"))
        first = sum(file.metadata.row_group(group).num_rows for group in range(piece.start))
        rows = sum(file.metadata.row_group(group).num_rows for group in groups)
        yield from read_cells(
            piece, _arrays(file, groups, piece.field, rows), first, rows, Meter(piece, advance), cuttable=cuttable
        )


def _arrays(file: Any, groups: range, field: str, rows: int) -> Iterator[Any]:
    size = sum(_column(file, group, field).total_uncompressed_size for group in groups)
    batch = min(max(rows * _BATCH_BYTES // max(size, 1), 1), _BATCH_ROWS)
    for records in file.iter_batches(batch, row_groups=list(groups), columns=[field], use_threads=False):
        yield records.column(field)


def _column(file: Any, group: int, field: str) -> Any:
    """The metadata of a row group's column."""
    metadata = file.metadata.row_group(group)
    for index in range(metadata.num_columns):
        if metadata.column(index).path_in_schema == field:
            return metadata.column(index)
    raise KeyError(f"no column {field}")


def _open(path: str) -> Any:
    from pyarrow.parquet import ParquetFile

    # pre_buffer would read all of a row group before its first row
    return ParquetFile(path, pre_buffer=False, buffer_size=_READ_BYTES, page_checksum_verification=True)
