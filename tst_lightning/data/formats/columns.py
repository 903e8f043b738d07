"""Columns of text: what Parquet files and Hugging Face data sets have in common. A row is a document."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tst_lightning.data.formats.blocks import unreadable
from tst_lightning.data.formats.plain import cut_text
from tst_lightning.data.pieces import EMPTY, NOT_TEXT, End, Meter, Piece

_COLUMNS_SHOWN = 20


def column_fault(path: str, schema: Any, field: str) -> str | None:
    """What is wrong if an Arrow schema has no column ``field`` of text."""
    columns = schema.names
    if (count := columns.count(field)) != 1:
        has = ", ".join(columns[:_COLUMNS_SHOWN]) + (", ..." if len(columns) > _COLUMNS_SHOWN else "")
        return (
            f"{path} has {f'{count} columns' if count else 'no column'} {field!r} (it has {has or 'none'}): "
            "name the column that holds the text with --field"
        )
    kind = schema.field(field).type
    if not _is_text(kind):
        texts = [column.name for column in schema if _is_text(column.type)][:_COLUMNS_SHOWN]
        return (
            f"column {field!r} of {path} holds {kind}, not strings (columns of strings: {', '.join(texts) or 'none'}): "
            "name the column that holds the text with --field"
        )
    return None


def read_cells(
    piece: Piece, columns: Iterable[Any], first: int, rows: int, meter: Meter, *, cuttable: bool
) -> Iterator[str | End]:
    """The documents of a piece that holds a column.

    Args:
        piece: what is read.
        columns: its Arrow arrays in order; what goes wrong with them is an Arrow error.
        first: the first row's index in the file.
        rows: how many rows are due.
        meter: told how much is read.
        cuttable: whether a text may be encoded in stretches.

    Raises:
        UnreadableInput: if the file is damaged or has other rows.
    """
    row = first
    for cell in _cells(columns, piece.path):
        name = f"{piece.path}:row {row}"
        row += 1
        if not cell:
            yield End(0, EMPTY, name)
        else:
            try:
                text = cell.decode()
            except UnicodeDecodeError:
                yield End(0, NOT_TEXT, name)
            else:
                yield from cut_text(text, cuttable=cuttable)
                yield End(len(cell), None, name)
        meter.at(piece.bytes * (row - first) // max(rows, 1))
    if row - first != rows:
        raise unreadable(piece.path, OSError(f"{row - first:,} rows, {rows:,} expected"))
    meter.finish()


def _cells(columns: Iterable[Any], path: str) -> Iterator[bytes | None]:
    """Bytes rather than strings, because a damaged file may hold any."""
    import pyarrow as pa

    binary = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
    arrays = iter(columns)
    while True:
        try:
            array = next(arrays, None)
            if array is None:
                return
            if pa.types.is_dictionary(array.type):
                array = array.dictionary_decode()
            array = array.cast(binary[array.type])
        except (pa.ArrowException, OSError, KeyError) as error:  # KeyError: another file is in its place
            raise unreadable(path, error) from error
        for cell in array:
            yield cell.as_py()


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))
