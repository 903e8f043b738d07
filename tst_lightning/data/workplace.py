"""Where a command works before there is a corpus: kept when there is something to go on with, else removed."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from tst_lightning.data.corpus import SHARD, SIDECAR
from tst_lightning.data.publish import publish
from tst_lightning.data.stores import StoreError, StorePath
from tst_lightning.data.supervise import PrepareError, Stopped, stoppable
from tst_lightning.errors import UserError

PARTS = "parts"
_FINISHED = "finished.json"
_LOG = "tst-lightning.log"  # locked by whoever works; also the sign that a directory is one of ours

_DYING_SECONDS = 5.0  # how long killed processes of an earlier call may hold its lock


class Workplace:
    """A directory for unfinished work; no part of it ever loads as a corpus under the output's name.

    Args:
        directory: where it lies; made if it is not there.
        output: where the finished corpus goes.
        call: what was asked for, in plain types: finished work of another call is not taken for this one's.

    Attributes:
        log: for :func:`~tst_lightning.data.supervise.run_job`, while it is open. Its lock goes to the processes that
            do the work, so that nobody else begins before the last of them is gone.
    """

    def __init__(self, directory: Path, output: Path | StorePath, call: dict[str, Any]) -> None:
        self.directory = directory
        self.output = output
        self.log: IO[str] | None = None
        self._is_delivered = False
        self._call = json.loads(json.dumps(call))

    @property
    def prepared(self) -> Path:
        """The corpus or shard in the making."""
        return self.directory / "prepared"

    @property
    def is_finished(self) -> bool:
        """Whether all is done but to put it where it belongs."""
        return self._finished() is not None

    @property
    def result(self) -> dict[str, Any]:
        """What was given to :meth:`finish` by the call that did the work."""
        finished = self._finished()
        assert finished is not None
        return finished

    def _finished(self) -> dict[str, Any] | None:
        if any((self.prepared / name).is_file() for name in (SIDECAR, SHARD)):
            with suppress(OSError, ValueError, KeyError, TypeError):
                state = json.loads((self.directory / _FINISHED).read_text(encoding="utf-8"))
                if state["call"] == self._call:
                    return dict(state["result"])
        return None

    @contextmanager
    def open(self) -> Iterator[None]:
        """Work here, alone; at the end put away what nobody could go on with.

        Raises:
            UserError: if another process works here.
            PrepareError: if the work failed, with what became of it.
        """
        parents = [*self.directory.parents, *(self.output.parents if isinstance(self.output, Path) else ())]
        new = list(dict.fromkeys(parent for parent in parents if not parent.exists()))
        alone, existed = False, self.directory.exists()
        with stoppable(), ExitStack() as stack:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                self.log = stack.enter_context((self.directory / _LOG).open("a+", encoding="utf-8", errors="replace"))
                alone = _is_ours_alone(self.log)
                if not alone:
                    raise UserError(_in_use(self.directory))
                yield
            except (PrepareError, Stopped) as error:
                error.left = self._put_away(new, alone)
                raise
            except OSError as error:
                failure = PrepareError(str(error))
                failure.left = self._put_away(new, alone)
                raise failure from error
            except UserError as error:  # what is asked for cannot be done: nobody goes on from here
                if alone and self.is_finished:
                    raise UserError([*error.faults, self._put_away(new, alone)]) from error
                if alone and not existed:
                    shutil.rmtree(self.directory, ignore_errors=True)
                    self._removed(new)
                raise
            except BaseException:
                self._put_away(new, alone)
                raise

    def finish(self, *, progress: bool, result: dict[str, Any] | None = None) -> None:
        """Put the finished work where it belongs, and nothing stays here.

        Args:
            progress: show an upload's.
            result: what a call that goes on from here would want to know; None if this is such a call.

        Raises:
            PrepareError: if it cannot be uploaded.
        """
        if not self.is_finished:
            temporary = self.directory / f"{_FINISHED}.tmp"
            temporary.write_text(json.dumps({"call": self._call, "result": result or {}}), encoding="utf-8")
            temporary.replace(self.directory / _FINISHED)
        if isinstance(self.output, StorePath):
            try:
                publish(self.prepared, self.output, progress=progress)
            except StoreError as error:
                raise PrepareError(str(error)) from error
        else:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            finished = self.prepared
            if self.output.parent.stat().st_dev != finished.stat().st_dev:  # where a rename cannot go
                copy = self.output.with_name(f"{self.output.name}.unfinished-copy")
                shutil.rmtree(copy, ignore_errors=True)
                try:
                    finished = shutil.copytree(finished, copy)
                except BaseException:
                    shutil.rmtree(copy, ignore_errors=True)
                    raise
            os.replace(finished, self.output)
        self._is_delivered = True
        shutil.rmtree(self.directory, ignore_errors=True)

    def _put_away(self, new: list[Path], alone: bool) -> str:
        """Remove what is no use, and say what is left."""
        if not alone:
            with suppress(OSError):
                self.directory.rmdir()  # if it is empty
            return self._removed(new)
        if self._is_delivered:
            shutil.rmtree(self.directory, ignore_errors=True)
            return f"{self.output} was finished before"
        kept = None
        if self.is_finished:
            kept = "the finished corpus"
        elif any(any((folder / PARTS).glob("*.json")) for folder in (self.directory, self.prepared)):
            kept = "the work done so far"
        if kept is not None:
            return f"{kept} is kept in {self.directory}: the same command with --resume goes on from there"
        shutil.rmtree(self.directory, ignore_errors=True)
        return self._removed(new)

    def _removed(self, parents: list[Path]) -> str:
        for parent in parents:
            with suppress(OSError):
                parent.rmdir()
        return "nothing was left"


def workplace_faults(directory: Path, output: Path | StorePath, *, resume: bool) -> list[str]:
    """Why there can be no work in ``directory``; to be asked before the work.

    Args:
        directory: where the work would lie.
        output: where the corpus would go.
        resume: whether work that lies there may be gone on with.
    """
    if isinstance(output, Path):
        real, other = Path(os.path.realpath(directory)), Path(os.path.realpath(output))
        if real.is_relative_to(other) or other.is_relative_to(real):
            return [f"--work {directory} and --output {output} lie in each other: name another directory by --work"]
    if "{%" in str(directory):  # LitData would put the date in
        return [f"{directory}, where unfinished work would lie, must not hold {{%: name another directory by --work"]
    if not os.path.lexists(directory):
        return []
    if not directory.is_dir():
        return [f"{directory}, where unfinished work would lie, is a file: name another directory by --work"]
    if not any(directory.iterdir()):
        return []
    log = directory / _LOG
    if not log.is_file():
        return [f"{directory}, where unfinished work would lie, holds other files: name another directory by --work"]
    with log.open("r+") as file:
        if not _is_ours_alone(file):
            return [_in_use(directory)]
    if not resume and any(path.name != _LOG for path in directory.iterdir()):
        return [
            f"{directory} holds the work of an interrupted call: go on with it by --resume, or delete it to begin anew"
        ]
    return []


def _is_ours_alone(lock: IO[str]) -> bool:
    deadline = time.monotonic() + _DYING_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        else:
            return True


def _in_use(directory: Path) -> str:
    return f"another process works in {directory}: wait for it, or stop it"
