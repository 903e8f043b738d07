"""What interrupts `prepare`: nothing half-made is left, and --resume gives what an undisturbed call gives."""

import errno
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import small_parts
from tests.small_parts import contents, descendants, end, gone, run, start, write_lines
from tst_lightning.data import prepare as prepare_module
from tst_lightning.data import prepare_job
from tst_lightning.data.corpus import Corpus
from tst_lightning.data.prepare import prepare
from tst_lightning.data.supervise import PrepareError
from tst_lightning.data.workplace import Workplace
from tst_lightning.errors import UserError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="finds the working processes in /proc"),
]

RESUME = "the same command with --resume goes on from there"
SHUFFLE = ["--shuffle", "--seed", "4", "--held-out", "0.05"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """JSON Lines of about eight parts, a tokenizer, and what an undisturbed call makes of them."""
    folder = tmp_path_factory.mktemp("source")
    draw = random.Random(0)
    words = ["sea", "whale", "ship", "été", "1851", "don't"]
    write_lines(folder / "a.jsonl", [" ".join(draw.choices(words, k=draw.randrange(90))) for _ in range(1300)])
    for name, options in {"plain": ["--train-tokenizer", "262"], "shuffled": SHUFFLE}.items():
        tokenizer = [] if name == "plain" else ["--tokenizer", folder / "plain" / "tokenizer.json"]
        status, _, err = run(folder, "prepare", "a.jsonl", "--output", name, *options, *tokenizer)
        assert status == 0, err
    return folder


def call(source, *more):
    return ["prepare", source / "a.jsonl", "--output", "new/corpus", "--workers", "1", *more]


def with_tokenizer(source, *more):
    return call(source, "--tokenizer", source / "plain" / "tokenizer.json", *SHUFFLE, *more)


def left_over(folder):
    """Everything in a folder but what the tests put there."""
    return sorted(path.name for path in folder.iterdir() if path.name not in ("pause", "paused"))


# Signals and kills


@pytest.mark.parametrize(
    ("place", "number", "kept"),
    [
        ("counting the documents", signal.SIGTERM, False),
        ("training the tokenizer", signal.SIGTERM, False),
        ("tokenising", signal.SIGINT, False),
        ("tokenising", signal.SIGHUP, False),
        ("part 1", signal.SIGINT, True),
        ("part 1", signal.SIGTERM, True),
        ("part 1", signal.SIGHUP, True),
        ("train written", signal.SIGTERM, True),
    ],
)
def test_a_stopped_command_keeps_finished_parts_and_nothing_else(source, tmp_path, place, number, kept):
    arguments = call(source, "--train-tokenizer", "262")
    status, err = end(start(tmp_path, *arguments, at=place), number)
    assert status == 128 + number
    assert "Traceback" not in err
    if not kept:
        assert err.splitlines()[-1] == "stopped: nothing was left"
        assert left_over(tmp_path) == []
        return
    work = tmp_path / "new" / "corpus.unfinished"
    assert err.splitlines()[-1] == f"stopped: the work done so far is kept in {work}: {RESUME}"
    assert left_over(tmp_path / "new") == ["corpus.unfinished"]
    with pytest.raises(UserError, match="not a prepared directory"):
        Corpus.load(work)
    done = run(tmp_path, *arguments, "--resume")
    assert done[0] == 0, done
    assert contents(tmp_path / "new" / "corpus") == contents(source / "plain")
    assert left_over(tmp_path / "new") == ["corpus"]


PLACES = [
    "tokenising",
    "part 0",
    "part 3",
    "assembling",
    "shuffling",
    "train written",
    "checksums",
    "finished",
    "rename",
]


@pytest.mark.parametrize("place", PLACES)
def test_after_a_kill_at_any_place_a_resumed_call_gives_the_same_bytes(source, tmp_path, place):
    """SIGKILL of the command: nothing can be put away, and no process is left."""
    process = start(tmp_path, *with_tokenizer(source), at=place)
    status, _ = end(process)
    assert status == -signal.SIGKILL
    assert left_over(tmp_path / "new") == ["corpus.unfinished"]
    work = tmp_path / "new" / "corpus.unfinished"
    status, _, err = run(tmp_path, *with_tokenizer(source))
    assert status == 2
    assert err == (
        f"error: {work} holds the work of an interrupted call: go on with it by --resume, or delete it to begin anew\n"
    )
    stamps = {path.name: path.stat().st_mtime_ns for path in (work / "parts").glob("*.tokens")}
    assert bool(stamps) == (place != "tokenising")

    process = start(tmp_path, *with_tokenizer(source, "--resume"), at="rename")
    again = {path.name: path.stat().st_mtime_ns for path in (work / "parts").glob("*.tokens")}
    assert len(again) >= 7 and {name: again[name] for name in stamps} == stamps  # done work is not done again
    (tmp_path / "pause").unlink()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "skipped 1" in out and "(empty)" in out
    assert contents(tmp_path / "new" / "corpus") == contents(source / "shuffled")
    assert left_over(tmp_path / "new") == ["corpus"]


def test_a_kill_while_the_tokenizer_is_trained(source, tmp_path):
    arguments = call(source, "--train-tokenizer", "262")
    end(start(tmp_path, *arguments, at="training the tokenizer"))
    assert run(tmp_path, *arguments, "--resume")[0] == 0
    assert contents(tmp_path / "new" / "corpus") == contents(source / "plain")


def test_a_kill_of_the_process_that_works(source, tmp_path):
    process = start(tmp_path, *with_tokenizer(source), at="part 2")
    below = descendants(process.pid)
    os.kill(below[0], signal.SIGKILL)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    work = tmp_path / "new" / "corpus.unfinished"
    assert err.splitlines()[-1] == (
        "error: the process that prepares the corpus was ended by SIGKILL (was there too little memory?): "
        f"the work done so far is kept in {work}: {RESUME}"
    )
    assert "Traceback" not in err
    assert all(map(gone, below))
    assert run(tmp_path, *with_tokenizer(source, "--resume"))[0] == 0
    assert contents(tmp_path / "new" / "corpus") == contents(source / "shuffled")


def test_a_kill_of_one_worker_of_some(source, tmp_path):
    arguments = [*with_tokenizer(source), "--workers", "2"]
    process = start(tmp_path, *arguments, at="part 0")
    job, *others = descendants(process.pid)
    workers = [pid for pid in others if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    (tmp_path / "pause").unlink()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    work = tmp_path / "new" / "corpus.unfinished"
    assert err.splitlines()[-1] == (
        "error: a worker process was ended by the system (was there too little memory?): "
        f"the work done so far is kept in {work}: {RESUME}"
    )
    assert "Traceback" not in err
    assert all(map(gone, [job, *others]))
    assert run(tmp_path, *arguments, "--resume")[0] == 0
    assert contents(tmp_path / "new" / "corpus") == contents(source / "shuffled")


def test_a_killed_command_takes_its_workers_with_it(source, tmp_path):
    process = start(tmp_path, *with_tokenizer(source), "--workers", "2", at="part 0")
    assert len(descendants(process.pid)) >= 3
    end(process)  # which looks at every one of them


def test_a_shard_goes_on_too(source, tmp_path):
    arguments = call(source, "--tokenizer", source / "plain" / "tokenizer.json", "--shard", "1/2")
    assert run(tmp_path, *arguments[:3], "undisturbed", *arguments[4:])[0] == 0
    for place, more in (("part 1", []), ("finished", ["--resume"]), ("rename", ["--resume"])):
        end(start(tmp_path, *arguments, *more, at=place))
    # of what is finished nothing is done again
    status, _, err = run(tmp_path, *arguments, "--resume")
    assert status == 0
    assert "tokenising" not in err
    assert contents(tmp_path / "new" / "corpus") == contents(tmp_path / "undisturbed")
    assert left_over(tmp_path / "new") == ["corpus"]


def test_resume_with_nothing_to_resume_just_starts(source, tmp_path):
    assert run(tmp_path, *with_tokenizer(source, "--resume"))[0] == 0
    assert contents(tmp_path / "new" / "corpus") == contents(source / "shuffled")


def test_the_options_of_the_assembly_may_change(source, tmp_path):
    end(start(tmp_path, *call(source, "--tokenizer", source / "plain" / "tokenizer.json"), at="part 2"))
    assert run(tmp_path, *with_tokenizer(source, "--resume"))[0] == 0
    assert contents(tmp_path / "new" / "corpus") == contents(source / "shuffled")


# What --resume refuses, and what it repairs


@pytest.fixture
def interrupted(source, tmp_path):
    """Work that was interrupted, on a copy of the input."""
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
        shutil.copy(source / "a.jsonl", folder / name)
    end(start(tmp_path, "prepare", folder, "--output", "corpus", "--train-tokenizer", "262", at="part 1"))
    return folder


def test_every_difference_is_named(interrupted, tmp_path):
    (interrupted / "a.jsonl").touch()
    (interrupted / "b.jsonl").unlink()
    write_lines(interrupted / "d.txt", ["new"])
    options = ["--train-tokenizer", "300", "--format", "jsonl", "--field", "text", "--held-out", "0.2", "--seed", "3"]
    before = contents(tmp_path / "corpus.unfinished")
    status, _, err = run(tmp_path, "prepare", interrupted, "--output", "corpus", *options, "--resume")
    assert status == 2
    way_out = f": give what was given then, or delete {tmp_path / 'corpus.unfinished'} to begin anew"
    assert err.splitlines() == [
        f"error: --resume: {fault}{way_out}"
        for fault in (
            "--format was auto, and is jsonl now",
            "--train-tokenizer was 262, and is 300 now",
            "--held-out was 0.01, and is 0.2 now",
            "--seed was 0, and is 3 now",
            f"{interrupted / 'a.jsonl'}: changed since",
            f"{interrupted / 'b.jsonl'}: not among the inputs now",
            f"{interrupted / 'd.txt'}: not among the inputs then",
        )
    ]
    after = contents(tmp_path / "corpus.unfinished")
    assert {name: before[name] for name in before if name.startswith("parts")}.items() <= after.items()


def test_another_tokenizer_or_shard_is_a_difference(source, interrupted, tmp_path):
    tokenizer = source / "plain" / "tokenizer.json"
    more = ["--tokenizer", tokenizer, "--shard", "0/2", "--end-of-text", "<|endoftext|>"]
    status, _, err = run(tmp_path, "prepare", interrupted, "--output", "corpus", *more, "--resume")
    assert status == 2
    for fault in (
        "--tokenizer (hash) was not given, and is ",
        "--train-tokenizer was 262, and is not given now",
        "--end-of-text was not given, and is <|endoftext|> now",
        "--shard was not given, and is 0/2 now",
    ):
        assert f"error: --resume: {fault}" in err


def test_other_order_and_a_damaged_plan(interrupted, tmp_path):
    files = [interrupted / f"{name}.jsonl" for name in "bac"]
    more = ["--output", "corpus", "--train-tokenizer", "262", "--resume"]
    status, _, err = run(tmp_path, "prepare", *files, *more)
    assert status == 2 and "the inputs come in another order now" in err
    plan = tmp_path / "corpus.unfinished" / "plan.json"
    plan.write_text(plan.read_text().replace('"parts": ', '"parts": 1'))
    status, _, err = run(tmp_path, "prepare", interrupted, *more)
    assert status == 2 and "another release cut the input into other parts" in err
    plan.write_text("")
    status, _, err = run(tmp_path, "prepare", interrupted, *more)
    assert status == 2 and f"--resume: {plan} is damaged (JSONDecodeError" in err


def test_finished_work_on_inputs_that_changed_is_not_taken(source, tmp_path):
    path = shutil.copy(source / "a.jsonl", tmp_path / "a.jsonl")
    arguments = ["prepare", path, "--output", "out/corpus", "--train-tokenizer", "262"]
    end(start(tmp_path, *arguments, at="finished"))
    with open(path, "a") as file:
        file.write('{"text": "more"}\n')
    status, _, err = run(tmp_path, *arguments, "--resume")
    assert status == 2 and f"{path}: changed since" in err


def test_a_part_that_was_damaged_since_is_made_again(source, tmp_path):
    end(start(tmp_path, *with_tokenizer(source), at="part 3"))
    parts = tmp_path / "new" / "corpus.unfinished" / "parts"
    for name, content in {"000000.json": b"", "000001.tokens": b"\0" * 100, "000002.documents.npy": b""}.items():
        (parts / name).write_bytes(content)
    (parts / "000003.tokens").unlink()
    assert run(tmp_path, *with_tokenizer(source, "--resume"))[0] == 0
    assert contents(tmp_path / "new" / "corpus") == contents(source / "shuffled")


def test_two_at_once(source, tmp_path):
    process = start(tmp_path, *with_tokenizer(source), at="part 1")
    for more in ([], ["--resume"]):
        folder = tmp_path / f"other{len(more)}"
        folder.mkdir()
        arguments = [tmp_path / "new/corpus" if each == "new/corpus" else each for each in with_tokenizer(source)]
        status, _, err = run(folder, *arguments, *more)
        assert status == 2
        work = tmp_path / "new" / "corpus.unfinished"
        assert err == f"error: another process works in {work}: wait for it, or stop it\n"
    (tmp_path / "pause").unlink()
    assert process.wait(60) == 0
    assert contents(tmp_path / "new" / "corpus") == contents(source / "shuffled")


# Disks and inputs


@pytest.mark.parametrize("kept", [False, True])
def test_an_input_that_ends_in_the_middle(source, tmp_path, kept):
    whole = gzip.compress((source / "a.jsonl").read_bytes())
    (tmp_path / "z.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    inputs = [source / "a.jsonl"] if kept else []
    arguments = [*inputs, tmp_path / "z.jsonl.gz", "--output", "corpus"]
    status, _, err = run(tmp_path, "prepare", *arguments, "--tokenizer", source / "plain" / "tokenizer.json")
    assert status == 1
    last = err.splitlines()[-1]
    assert last.startswith(f"error: {tmp_path / 'z.jsonl.gz'} cannot be read to its end (")
    assert last.endswith(RESUME if kept else ": nothing was left")
    assert "Traceback" not in err
    assert left_over(tmp_path) == (["corpus.unfinished", "z.jsonl.gz"] if kept else ["z.jsonl.gz"])


def in_this_process(monkeypatch, job_module=prepare_job):
    """Let the command do its work here, where the tests can break things."""

    def run_job(job, log, progress):
        import io

        from tst_lightning.data.jobs import Reporter

        try:
            return job_module.prepare_corpus(job, Reporter(io.StringIO()))
        except OSError as error:
            raise PrepareError(str(error)) from error

    monkeypatch.setattr(prepare_module, "run_job", run_job)
    small_parts.set_small(monkeypatch)


def here(source, output, **more):
    options = {"held_out": 0.05, "seed": 4, "shuffle": True, "progress": False, "workers": 1} | more
    return prepare(source / "a.jsonl", output, tokenizer=source / "plain" / "tokenizer.json", **options)


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("place", ["the first part", "a later part", "assembling", "no room", "the result"])
def test_a_full_disk(source, tmp_path, monkeypatch, place):
    in_this_process(monkeypatch)
    with monkeypatch.context() as patch:
        if place in ("the first part", "a later part"):
            finish, count = prepare_job.PartWriter.finish, iter(range(100))

            def full_at_last(self):
                return full() if next(count) >= (2 if place == "a later part" else 0) else finish(self)

            patch.setattr(prepare_job.PartWriter, "finish", full_at_last)
        elif place == "assembling":
            from litdata.streaming import Cache

            patch.setattr(Cache, "__setitem__", full)
        elif place == "no room":
            patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
        else:
            replace = os.replace
            patch.setattr(os, "replace", lambda a, b: full() if Path(a).name == "prepared" else replace(a, b))
        with pytest.raises(PrepareError, match="No space left on device") as caught:
            here(source, tmp_path / "corpus")
    message = str(caught.value)
    if place == "the first part":
        assert message.endswith(": nothing was left") and left_over(tmp_path) == []
    else:
        kind = "the finished corpus" if place == "the result" else "the work done so far"
        assert message.endswith(f"{kind} is kept in {tmp_path / 'corpus.unfinished'}: {RESUME}")
        assert left_over(tmp_path) == ["corpus.unfinished"]
    here(source, tmp_path / "corpus", resume=True)
    assert contents(tmp_path / "corpus") == contents_of_records(source, tmp_path)


def contents_of_records(source, tmp_path):
    here(source, tmp_path / "undisturbed")
    return contents(tmp_path / "undisturbed")


class _OtherDisk:
    """Paths whose device differs from their neighbours'."""

    def __init__(self, monkeypatch, folder):
        stat = Path.stat

        def fake(path, **more):
            status = stat(path, **more)
            return SimpleNamespace(st_dev=-1, st_mode=status.st_mode) if path == folder else status

        monkeypatch.setattr(Path, "stat", fake)


def test_work_on_another_disk_is_copied(source, tmp_path, monkeypatch):
    in_this_process(monkeypatch)
    here(source, tmp_path / "undisturbed")
    (tmp_path / "out").mkdir()
    with monkeypatch.context() as patch:
        _OtherDisk(patch, tmp_path / "out")
        copytree = shutil.copytree
        copies = []
        patch.setattr(shutil, "copytree", lambda *paths: copies.append(paths) or copytree(*paths))
        here(source, tmp_path / "out" / "corpus", work=tmp_path / "work")
    assert copies[0][0] == tmp_path / "work" / "prepared"
    assert contents(tmp_path / "out" / "corpus") == contents(tmp_path / "undisturbed")
    assert left_over(tmp_path) == ["out", "undisturbed"] and left_over(tmp_path / "out") == ["corpus"]


def test_a_copy_that_fails_is_removed_and_the_work_kept(source, tmp_path, monkeypatch):
    in_this_process(monkeypatch)
    (tmp_path / "out").mkdir()
    with monkeypatch.context() as patch:
        _OtherDisk(patch, tmp_path / "out")
        patch.setattr(shutil, "copytree", lambda one, other: Path(other).mkdir() or full())
        with pytest.raises(PrepareError, match=f"the finished corpus is kept in {tmp_path / 'work'}"):
            here(source, tmp_path / "out" / "corpus", work=tmp_path / "work")
        assert left_over(tmp_path / "out") == []
    here(source, tmp_path / "out" / "corpus", work=tmp_path / "work", resume=True)
    assert left_over(tmp_path) == ["out"] and left_over(tmp_path / "out") == ["corpus"]


def test_where_no_work_can_be(source, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    (tmp_path / "file").write_text("a file")
    (tmp_path / "in").mkdir()
    shutil.copy(source / "a.jsonl", tmp_path / "in")
    for work, message in {
        "full": "holds other files: name another directory by --work",
        "file": "is a file: name another directory by --work",
        "corpus": "lie in each other",
        "corpus/work": "lie in each other",
        ".": "lie in each other",
        "in/work": "lies in the input folder",
    }.items():
        for resume in (False, True):
            with pytest.raises(UserError, match=message):
                prepare(tmp_path / "in", tmp_path / "corpus", train_tokenizer=300, work=tmp_path / work, resume=resume)
    assert (tmp_path / "full" / "mine").read_text() == "mine"
    assert left_over(tmp_path) == ["file", "full", "in"]


@pytest.mark.parametrize("resumed", [False, True])
def test_what_cannot_be_done_leaves_nothing_but_what_was_there(source, tmp_path, monkeypatch, resumed):
    in_this_process(monkeypatch)
    if resumed:
        end(start(tmp_path, *with_tokenizer(source), at="part 2"))
    before = contents(tmp_path)
    with pytest.raises(UserError, match="--max-tokens 2 leaves no documents"):
        here(source, tmp_path / "new" / "corpus", max_tokens=2, resume=resumed)
    assert left_over(tmp_path) == (["new"] if resumed else [])
    after = contents(tmp_path)
    parts = [name for name in before if "/parts/" in name]
    assert bool(parts) == resumed and all(before[name] == after[name] for name in parts)


def test_a_signal_while_the_workplace_is_made(tmp_path, monkeypatch):
    place = Workplace(tmp_path / "new" / "work", tmp_path / "new" / "corpus", {})
    mkdir = Path.mkdir

    def slow(path, *rest, **more):
        mkdir(path, *rest, **more)
        if path == place.directory:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)

    monkeypatch.setattr(Path, "mkdir", slow)
    with pytest.raises(KeyboardInterrupt) as caught, place.open():
        pass
    assert caught.value.left == "nothing was left"
    assert left_over(tmp_path) == []


def test_a_signal_after_the_corpus_is_where_it_belongs(source, tmp_path, monkeypatch):
    in_this_process(monkeypatch)
    rmtree = shutil.rmtree

    def interrupted(path, **more):
        if path == tmp_path / "corpus.unfinished":
            monkeypatch.setattr(shutil, "rmtree", rmtree)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
        rmtree(path, **more)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        here(source, tmp_path / "corpus")
    assert caught.value.left == f"{tmp_path / 'corpus'} was finished before"
    assert left_over(tmp_path) == ["corpus"]
    Corpus.load(tmp_path / "corpus")


def test_a_finished_shard_that_nobody_has_named_yet_is_kept(tmp_path):
    place = Workplace(tmp_path / "work", tmp_path / "corpus", {})
    (place.prepared / "parts").mkdir(parents=True)
    (place.prepared / "parts" / "000000.json").touch()
    (place.prepared / "shard.json").touch()
    with pytest.raises(PrepareError, match="the work done so far is kept in"), place.open():
        raise PrepareError("some failure")


def test_finished_work_of_another_call_is_not_this_ones(tmp_path):
    for call, finished in (({"a": 1}, True), ({"a": 2}, False)):
        place = Workplace(tmp_path / "work", tmp_path / "corpus", call)
        (tmp_path / "work" / "prepared").mkdir(parents=True, exist_ok=True)
        (tmp_path / "work" / "prepared" / "corpus.json").touch()
        (tmp_path / "work" / "finished.json").write_text(json.dumps({"call": {"a": 1}, "result": {"skipped": {}}}))
        assert place.is_finished == finished


def test_memory_stays_within_bounds_however_large_the_input(source, tmp_path):
    """Over all processes: a worker holds a batch, the assembly a chunk of each split, and most of it is libraries."""
    size, limit = 210 << 20, 700 << 20
    draw = random.Random(1)
    lines = [json.dumps({"text": " ".join(draw.choices(["sea", "whale", "ship"], k=150))}) + "\n" for _ in range(2000)]
    block = "".join(lines)
    with (tmp_path / "large.jsonl").open("w") as file:
        file.writelines(block for _ in range(size // len(block) + 1))
    assert (tmp_path / "large.jsonl").stat().st_size >= size
    tokenizer = source / "plain" / "tokenizer.json"
    options = ["--workers", "2", "--shuffle", "--tokenizer", str(tokenizer)]
    process = subprocess.Popen(
        [sys.executable, "-m", "tst_lightning", "prepare", "large.jsonl", "--output", "corpus", *options],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(small_parts.ROOT)},
    )
    peak = 0
    while process.poll() is None:
        peak = max(peak, sum(map(private_bytes, [process.pid, *descendants(process.pid)])))
        time.sleep(0.05)
    assert process.returncode == 0, process.stderr.read()
    print(f"peak of {peak / 2**20:.0f} MiB")
    assert 100 << 20 < peak < limit


def private_bytes(pid):
    """Memory of a process but for the pages of files, which can be dropped."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon")), 0)
