"""The commands with small parts, that stop at a given place until they are killed or let go: run by `python -c`."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tst_lightning.__main__ import main as run_command
from tst_lightning.data import assemble, jobs, prepare_job, workplace
from tst_lightning.data.corpus import Corpus
from tst_lightning.data.documents import find_files
from tst_lightning.data.formats import jsonl

PART_BYTES = 40_000
PAUSE, PAUSED = Path("pause"), Path("paused")  # in the working directory
ROOT = Path(__file__).parents[1]


def set_small(patch: Any = None) -> None:
    """Cut the input small, for good or by pytest's monkeypatch."""
    set_attribute = setattr if patch is None else patch.setattr
    set_attribute(jsonl, "PIECE_BYTES", PART_BYTES // 2)
    set_attribute(prepare_job, "PART_BYTES", PART_BYTES)


@dataclass
class Job(prepare_job.Job):
    """Whose module is this one, so that its process comes to :func:`main`."""


def main() -> None:
    """The process that does the work."""
    set_small()
    in_parallel, phase = prepare_job.in_parallel, jobs.Reporter.phase

    def paused_parts(function: Any, tasks: Any, *rest: Any) -> Any:
        for number, part in enumerate(in_parallel(function, tasks, *rest)):
            yield part
            if function is prepare_job._tokenise_part:
                pause(f"part {number}")

    def paused_phase(self: jobs.Reporter, name: str, total: int) -> None:
        phase(self, name, total)
        pause(name)

    finish = assemble.SplitWriter.finish

    def paused_finish(self: Any) -> Any:
        split = finish(self)
        pause("train written")  # the held-out split has its records only
        return split

    prepare_job.in_parallel = paused_parts
    jobs.Reporter.phase = paused_phase
    assemble.SplitWriter.finish = paused_finish
    jobs.serve(Job, prepare_job.prepare_corpus)


def pause(place: str) -> None:
    """Wait here, if this is the place, until somebody removes the file."""
    while PAUSE.exists() and PAUSE.read_text() == place:
        PAUSED.touch()
        time.sleep(0.02)


def command() -> None:
    """The command itself."""
    set_small()
    prepare_job.Job = Job
    finish, replace = workplace.Workplace.finish, os.replace

    def paused_finish(self: Any, **more: Any) -> None:
        pause("finished")
        finish(self, **more)

    def paused_replace(source: Any, target: Any) -> None:
        if Path(source).name == "prepared":
            pause("rename")
        replace(source, target)

    workplace.Workplace.finish = paused_finish
    os.replace = paused_replace
    sys.exit(run_command(sys.argv[1:]))


def prepared_here(inputs: Any, output: Path, **options: Any) -> Any:
    """What `prepare` makes, in this process: a corpus, or the directory of a shard."""
    files, _ = find_files([inputs] if isinstance(inputs, Path) else inputs, [], [])
    work = output.with_name(f"{output.name}.work")
    work.mkdir()
    tokenizer = options.pop("tokenizer", None)
    values = {
        "files": files,
        "dataset": None,
        "format": "auto",
        "field": "text",
        "work": str(work),
        "tokenizer": None if tokenizer is None else str(tokenizer),
        "train_tokenizer": None,
        "end_of_text": None,
        "held_out": 0.01,
        "seed": 0,
        "shuffle": False,
        "max_tokens": None,
        "shard": None,
        "workers": 1,
        "record_tokens": 1000,
    }
    assert not set(options) - set(values)
    job = prepare_job.Job(**(values | options))
    prepare_job.prepare_corpus(job, jobs.Reporter(io.StringIO()))
    (work / "prepared").rename(output)
    shutil.rmtree(work)
    return output if job.shard is not None else Corpus.load(output)


def start(folder: Path, *arguments: Any, at: str | None = None) -> subprocess.Popen[str]:
    """Begin a command in ``folder``, and come back when it stands at a place."""
    (folder / PAUSED).unlink(missing_ok=True)
    (folder / PAUSE).unlink(missing_ok=True)
    if at is not None:
        (folder / PAUSE).write_text(at)
    process = subprocess.Popen(
        [sys.executable, "-c", "from tests.small_parts import command; command()", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while at is not None and not (folder / PAUSED).exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it never came there"
        time.sleep(0.02)
    return process


def run(folder: Path, *arguments: Any) -> tuple[int, str, str]:
    """A command from its start to its end: exit status, output and messages."""
    process = start(folder, *arguments)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def end(process: subprocess.Popen[str], number: int = signal.SIGKILL) -> tuple[int, str]:
    """Send a signal, wait until all of its processes are gone; exit status and messages."""
    below = descendants(process.pid)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    for pid in below:
        assert gone(pid), pid
    return process.returncode, err


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    children = [int(child) for child in path.read_text().split()] if path.exists() else []
    return children + [each for child in children for each in descendants(child)]


def gone(pid: int) -> bool:
    """Whether a process ends within some seconds."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":  # ended, and nobody has asked for its status
            return True
        time.sleep(0.05)
    return False


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, by name."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def write_lines(path: Path, texts: list[str]) -> Path:
    """A JSON Lines file."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path
