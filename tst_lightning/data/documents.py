"""Which text files are documents, which are held out, and how they are read. Standard library only.

A document is a file, or a range of bytes of one. Text is decoded strictly as UTF-8 and never changed:
newlines, byte-order marks and control characters stay as they are.
"""

from __future__ import annotations

import codecs
import hashlib
import mmap
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePath

from tst_lightning.errors import UserError

BLOCK_BYTES = 1 << 16

EMPTY = "empty"
NOT_TEXT = "not UTF-8 text"
UNREADABLE = "not readable"


@dataclass(frozen=True)
class Document:
    """The bytes ``start <= i < stop`` of a text file."""

    path: str
    start: int
    stop: int

    @property
    def bytes(self) -> int:
        """Bytes of text."""
        return self.stop - self.start


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


def check_file(path: str, advance: Callable[[int], None]) -> Document | str:
    """Read a whole file and say whether it is a document.

    Args:
        path: the file.
        advance: told of bytes as they are read.

    Returns:
        The document, or why the file is skipped.
    """
    size = 0
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for ever
            return UNREADABLE
        with open(path, "rb") as file:
            while block := file.read(16 * BLOCK_BYTES):
                if b"\0" in block:
                    return NOT_TEXT
                decoder.decode(block)
                size += len(block)
                advance(len(block))
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return NOT_TEXT
    except OSError:
        return UNREADABLE
    return Document(path, 0, size) if size else EMPTY


def split_documents(
    documents: Sequence[Document], *, held_out: float, seed: int
) -> tuple[list[Document], list[Document]]:
    """Hold out about ``held_out`` of the documents for validation: at least one, and never all.

    Whether a document is held out depends on the seed and its place in ``documents`` alone. A single document
    has its end held out instead, from the line break nearest to the fraction.

    Returns:
        Training and held-out documents, in order.

    Raises:
        UserError: if a single document has no line break to cut it at.
    """
    assert documents and 0 < held_out < 1
    if len(documents) == 1:
        front, end = _cut(documents[0], held_out)
        return [front], [end]

    def draw(index: int) -> float:
        digest = hashlib.sha256(f"{seed}:{index}".encode()).digest()
        return int.from_bytes(digest[:8], "big") / 2**64

    draws = [draw(index) for index in range(len(documents))]
    chosen = {index for index, value in enumerate(draws) if value < held_out}
    chosen |= {draws.index(min(draws))}
    chosen -= {draws.index(max(draws))}
    train = [document for index, document in enumerate(documents) if index not in chosen]
    return train, [documents[index] for index in sorted(chosen)]


def _cut(document: Document, held_out: float) -> tuple[Document, Document]:
    target = document.stop - round(document.bytes * held_out)
    with (
        open(document.path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text,
    ):
        breaks = (text.rfind(b"\n", 0, target) + 1, text.find(b"\n", target) + 1)
        cuts = [cut for cut in breaks if 0 < cut < document.stop]
    if not cuts:
        raise UserError(
            f"{document.path} is the only document and has no line break at which its end could be held out: "
            "give at least two documents"
        )
    cut = min(cuts, key=lambda cut: abs(cut - target))
    return Document(document.path, 0, cut), Document(document.path, cut, document.stop)


def read_pieces(document: Document, *, cuttable: bool) -> Iterator[str]:
    """The text of a document in order, in pieces of about ``BLOCK_BYTES`` if ``cuttable``, else in one.

    Pieces end between an ASCII letter or digit and a newline, nowhere else; a text without such a place stays
    in one piece.

    Raises:
        UserError: if the file changed since it was checked.
    """
    pending: list[str] = []
    last = ""  # the character before the block
    try:
        for block in _blocks(document):
            cut = _last_cut(last, block) if cuttable else None
            if cut is not None:
                pending.append(block[:cut])
                if piece := "".join(pending):
                    yield piece
                pending = [block[cut:]]
            else:
                pending.append(block)
            last = block[-1]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{document.path} changed while it was read ({error}): start again") from error
    if piece := "".join(pending):
        yield piece


def _blocks(document: Document) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    left = document.bytes
    with open(document.path, "rb") as file:
        if os.fstat(file.fileno()).st_size < document.stop:
            raise OSError("it is shorter now")
        file.seek(document.start)
        while left:
            block = file.read(min(BLOCK_BYTES, left))
            if not block:
                raise OSError("it is shorter now")
            left -= len(block)
            if text := decoder.decode(block, final=not left):
                yield text


def _last_cut(last: str, block: str) -> int | None:
    end = len(block)
    while (place := block.rfind("\n", 0, end)) >= 0:
        before = block[place - 1] if place else last
        if before.isascii() and before.isalnum():
            return place
        end = place
    return None
