"""Upload a finished corpus to a store, so that nobody ever reads an incomplete one. Light until it uploads."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from tst_lightning.data.corpus import CHECKSUMS, SIDECAR, file_sha256
from tst_lightning.data.stores import StoreError, StorePath
from tst_lightning.errors import UserError

if TYPE_CHECKING:
    from tqdm import tqdm

UPLOADS = 8  # files in flight


def output_faults(output: StorePath) -> list[str]:
    """Why no corpus can be published at ``output``; to be asked before the work. Empty if one can.

    Of an upload that was broken off, files may lie there: they are no corpus, and are used or overwritten.
    """
    try:
        sizes = output.sizes()
    except StoreError as error:
        return [str(error)]
    if SIDECAR in sizes:
        return [f"{output} already holds a prepared corpus: choose another --output, or delete it there"]
    return []


def publish(directory: Path, output: StorePath, *, progress: bool = True) -> None:
    """Upload the prepared ``directory``, its sidecar last: before that ``output`` is no corpus.

    Files that an upload that was broken off has left there, with the same hash, are not sent again.

    Args:
        directory: the finished corpus; it is left as it is.
        output: where to.
        progress: show it on standard error, where that is a terminal.

    Raises:
        UserError: if there is a corpus by now.
        StoreError: if a file cannot be uploaded.
    """
    from tqdm import tqdm

    if faults := output_faults(output):
        raise UserError(faults)
    hashes = _hashes(directory)
    there = output.sizes()
    names = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    names.remove(SIDECAR)
    total = sum((directory / name).stat().st_size for name in names)
    with tqdm(
        total=total, desc="upload", unit="B", unit_scale=True, file=sys.stderr, disable=None if progress else True
    ) as bar:
        upload = _Upload(directory, output, hashes, there, bar)
        with ThreadPoolExecutor(UPLOADS, thread_name_prefix="upload") as pool:
            try:
                list(pool.map(upload.send, names))  # raises the first error
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    (output / SIDECAR).upload(directory / SIDECAR, advance=lambda _: None)


class _Upload:
    """Sends the files, several at once."""

    def __init__(
        self, directory: Path, output: StorePath, hashes: dict[str, str], there: dict[str, int], bar: tqdm[object]
    ) -> None:
        self.directory = directory
        self.output = output
        self.hashes = hashes
        self.there = there
        self.bar = bar
        self.lock = threading.Lock()

    def send(self, name: str) -> None:
        path, target = self.directory / name, self.output / name
        digest, size = self.hashes.get(name) or file_sha256(path), path.stat().st_size
        if self.there.get(name) == size and target.sha256() == digest:
            self.advance(size)
        else:
            target.upload(path, advance=self.advance, sha256=digest)

    def advance(self, sent: int) -> None:
        with self.lock:
            self.bar.update(sent)


def _hashes(directory: Path) -> dict[str, str]:
    """What ``SHA256SUMS`` says."""
    lines = (directory / CHECKSUMS).read_text(encoding="utf-8").splitlines() if (directory / CHECKSUMS).exists() else []
    return {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
