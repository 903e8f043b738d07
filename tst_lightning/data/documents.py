"""Which files are read, what the work is cut into, and the documents of each piece.

A document is a text file, a line of a JSON Lines file, or a row of a Parquet file or of a Hugging Face data set.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePath

from tst_lightning.data.formats.blocks import COMPRESSIONS, compression_fault
from tst_lightning.data.formats.hub import plan_dataset, read_dataset
from tst_lightning.data.formats.jsonl import jsonl_fault, plan_jsonl, read_jsonl
from tst_lightning.data.formats.parquet import plan_parquet, read_parquet
from tst_lightning.data.formats.plain import plan_text, read_text
from tst_lightning.data.pieces import EMPTY, NOT_TEXT, End, Piece, UnreadableInput
from tst_lightning.errors import UserError

__all__ = [
    "EMPTY",
    "FORMATS",
    "NOT_TEXT",
    "End",
    "Piece",
    "UnreadableInput",
    "find_files",
    "plan_dataset",
    "plan_pieces",
    "read_piece",
]

FORMATS = ("auto", "text", "jsonl", "parquet")
_EXTENSIONS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_FAULTS_SHOWN = 20


def find_files(inputs: Iterable[Path], patterns: Sequence[str], excludes: Sequence[str]) -> tuple[list[str], list[str]]:
    """The files that ``inputs`` name, each once, in an order that is the same on every machine.

    A file is taken as it is. A folder gives the files below it whose name matches one of ``patterns`` (all,
    if there are none), unless a file or folder on the way matches one of ``excludes`` with its name or its
    path below the folder. Hidden files and folders (``.name``) are left out, and so are symbolic links to
    folders, so that there are no loops; links to files are followed.

    Returns:
        Paths in the order of ``inputs``, a folder's files sorted by the parts of their path; and the folders that
        cannot be read.
    """
    found: dict[str, str] = {}
    closed: list[str] = []
    for path in inputs:
        below = _files_below(path, patterns, excludes, closed) if path.is_dir() else [path]
        for file in below:
            found.setdefault(os.path.realpath(file), str(file))
    return list(found.values()), closed


def _files_below(folder: Path, patterns: Sequence[str], excludes: Sequence[str], closed: list[str]) -> list[Path]:
    files = []

    def note(error: OSError) -> None:
        closed.append(os.fsdecode(error.filename))

    for where, folders, names in os.walk(folder, onerror=note):  # does not follow links to folders
        here = PurePath(where).relative_to(folder)

        def kept(name: str, here: PurePath = here) -> bool:
            paths = (name, (here / name).as_posix())
            return not name.startswith(".") and not any(fnmatchcase(p, glob) for p in paths for glob in excludes)

        folders[:] = [name for name in folders if kept(name)]
        files += [
            here / name
            for name in names
            if kept(name) and (not patterns or any(fnmatchcase(name, glob) for glob in patterns))
        ]
    files.sort(key=lambda path: [os.fsencode(part) for part in path.parts])
    return [folder / path for path in files]


def plan_pieces(files: Sequence[str], *, format: str = "auto", field: str = "text") -> list[Piece]:
    """Cut files into pieces of whole documents, in the order of the files. None of them is read far.

    Args:
        files: paths.
        format: "text", "jsonl" or "parquet" for all of them; "auto" goes by each name. Compression goes by the
            name (``.gz``, ``.zst``) in any case.
        field: the JSON key or Parquet column that holds the text.

    Raises:
        UserError: naming every file that cannot be opened, is not what its name says or has no such field.
    """
    if format not in FORMATS:
        raise UserError(f"--format {format} must be one of {', '.join(FORMATS)}")
    pieces: list[Piece] = []
    faults = []
    for path in files:
        kind, compression = _kind(path)
        planned = _plan_file(path, kind if format == "auto" else format, compression, field)
        if isinstance(planned, str):
            faults.append(planned)
        else:
            pieces += planned
    if field != "text" and pieces and all(piece.field is None for piece in pieces):
        faults.append(f"--field {field} belongs to JSON Lines and Parquet, and all inputs are text files: leave it out")
    if faults:
        more = len(faults) - _FAULTS_SHOWN
        raise UserError(faults[:_FAULTS_SHOWN] + ([f"{more:,} more files have faults like these"] if more > 0 else []))
    return pieces


def read_piece(piece: Piece, advance: Callable[[int], None], *, cuttable: bool) -> Iterator[str | End]:
    """The documents of a piece: the text of each in order, in one or several strings, then its end.

    Args:
        piece: what to read.
        advance: told of bytes of input as they are read; they add up to ``piece.bytes``.
        cuttable: whether a text may be given in strings that are encoded one by one. They end between an ASCII
            letter or digit and a newline, nowhere else. If not, a document is one string.

    Raises:
        UnreadableInput: if an input changed since the work was planned, or is damaged. Its message names the file.
    """
    return _READERS[piece.format](piece, advance, cuttable=cuttable)


_READERS = {"text": read_text, "jsonl": read_jsonl, "parquet": read_parquet, "hf": read_dataset}


def _kind(path: str) -> tuple[str, str]:
    """Format and compression by a file's name."""
    name = PurePath(path).name.lower()
    compression = "none"
    for extension, kind in COMPRESSIONS.items():
        if name.endswith(extension):
            compression, name = kind, name.removesuffix(extension)
    extension = PurePath(name).suffix
    if compression != "none" and extension in (".json", ".parquet"):
        # JSON Lines is shipped as .json.gz; a plain .json is mostly one value. Parquet compresses by itself.
        return ("jsonl" if extension == ".json" else "text"), compression
    return _EXTENSIONS.get(extension, "text"), compression


def _plan_file(path: str, format: str, compression: str, field: str) -> list[Piece] | str:
    """The pieces of a file, or what is wrong with it."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
            return f"{path} is not a regular file: leave it out (--exclude)"
        if fault := compression_fault(path, "none" if format == "parquet" else compression):
            return fault
        if format == "parquet":
            return plan_parquet(path, field)
        if format == "text":
            return plan_text(path, compression, status.st_size)
        pieces = plan_jsonl(path, compression, status.st_size, field)
        return (jsonl_fault(pieces[0]) if pieces else None) or pieces
    except UnreadableInput as error:
        return str(error)
    except OSError as error:
        return f"{path} cannot be opened ({error.strerror or error}): make it readable, or leave it out (--exclude)"
