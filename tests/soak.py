"""Kill a run of two processes at many seeded moments, resume it each time, and hold it against one left alone.

``python -m tests.soak [KILLS] [LOG]`` writes the log as Markdown; ``make soak`` runs it, and a test runs a short one.
"""

import hashlib
import mmap
import os
import random
import shutil
import signal
import struct
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import yaml
from lightning.pytorch import Callback

from tests.conftest import VOCABULARY
from tests.runs import logged, start_ranks
from tst_lightning.checkpoints import list_checkpoints

RANKS = 2
STEPS_PER_KILL = 4
PLACES = ("start-up", "step", "save", "validation", "end")
WAYS = {
    "SIGKILL to both": (signal.SIGKILL, (0, 1)),
    "SIGKILL to rank 0": (signal.SIGKILL, (0,)),
    "SIGKILL to rank 1": (signal.SIGKILL, (1,)),
    "SIGTERM to rank 0": (signal.SIGTERM, (0,)),
    "SIGTERM to rank 1": (signal.SIGTERM, (1,)),
    "SIGTERM to both": (signal.SIGTERM, (0, 1)),
    "SIGINT to both": (signal.SIGINT, (0, 1)),
}


class Diary(Callback):
    """Writes down every micro-batch that a rank consumes, and where the rank is now, for the killer to see.

    Args:
        folder: of the files.
        incarnation: which start of the run this is.
    """

    STATE = struct.Struct("=iiii")  # place, step, micro-batch, steps since the start

    def __init__(self, folder: str, incarnation: int) -> None:
        self.folder, self.incarnation = Path(folder), incarnation

    def setup(self, trainer, pl_module, stage):
        rank = trainer.global_rank
        self.log = open(self.folder / f"consumed-{self.incarnation:03d}-{rank}.txt", "w", buffering=1)  # noqa: SIM115
        with (self.folder / f"state-{rank}").open("r+b") as file:
            self.state = mmap.mmap(file.fileno(), 0)
        self.first = None

    def _here(self, trainer, place, micro_batch=0):
        done = 0 if self.first is None else trainer.global_step - self.first
        self.state[:] = self.STATE.pack(PLACES.index(place), trainer.global_step, micro_batch, done)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.first is None:
            self.first = trainer.global_step
        step, micro_batch = trainer.global_step, batch_idx % trainer.accumulate_grad_batches
        digest = hashlib.sha256(batch.cpu().numpy().tobytes()).hexdigest()[:16]
        self.log.write(f"{step} {micro_batch} {tuple(batch.shape)} {digest}\n")
        self._here(trainer, "step", micro_batch)

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self._here(trainer, "save")

    def on_validation_start(self, trainer, pl_module):
        self._here(trainer, "validation")

    def on_train_end(self, trainer, pl_module):
        self._here(trainer, "end")


@dataclass
class Kill:
    """What is done to one incarnation, and what it met."""

    way: str
    target: str
    after_steps: int
    delay: float
    met: str = ""
    statuses: tuple[int, ...] = ()
    resumed_at: int = -1


def recipe(corpora: list[str], folder: Path, steps: int) -> Path:
    """Three stages (bags of 4, 2, 1), a mixture of two sources, accumulation 2, two ranks."""
    network = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    path = folder / "recipe.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "phases": {"stages": [{"bag_size": 4, "ratio": 0.3}, {"bag_size": 2, "ratio": 0.3}]},
                "seed_everything": 3,
                "trainer": {
                    "max_steps": steps,
                    "accelerator": "cpu",
                    "accumulate_grad_batches": 2,
                    "gradient_clip_val": 1.0,
                    "val_check_interval": 8,
                    "log_every_n_steps": 1,
                    "default_root_dir": "run",
                    "enable_progress_bar": False,
                },
                "model": {
                    "network": {"class_path": "tst_lightning.Transformer", "init_args": {"config": network}},
                    "warmup_steps": 4,
                },
                "data": {
                    "sources": [{"path": path, "weight": weight} for path, weight in zip(corpora, (2, 1), strict=True)],
                    "latent_length": 16,
                    "global_batch_size": 4,
                    "unit_windows": 4,
                    "val_batch_size": 4,
                    "seed": 5,
                },
                "checkpoint": {"every_n_steps": 5},
                "samples": {"prompts": []},
            }
        )
    )
    return path


def begin(folder: Path, recipe: Path, incarnation: int):
    """Start both ranks of one incarnation."""
    for rank in range(RANKS):
        (folder / f"state-{rank}").write_bytes(Diary.STATE.pack(0, -1, 0, 0))
    return start_ranks(
        "fit", "--config", recipe, "--ckpt_path=last", "--trainer.callbacks+=tests.soak.Diary",
        f"--trainer.callbacks.folder={folder}", f"--trainer.callbacks.incarnation={incarnation}",
        folder=folder, ranks=RANKS,
    )  # fmt: skip


def state(folder: Path, rank: int) -> tuple[str, int, int, int]:
    place, step, micro_batch, done = Diary.STATE.unpack((folder / f"state-{rank}").read_bytes())
    return PLACES[place], step, micro_batch, done


def wait_for(kill: Kill, folder: Path, processes) -> None:
    """Return at the moment that was drawn, or when there is nothing left to kill."""
    begun, deadline = time.monotonic(), time.monotonic() + 120
    watched = WAYS[kill.way][1][0]
    while all(process.is_alive() for process in processes) and time.monotonic() < deadline:
        place, _, _, done = state(folder, watched)
        if kill.target == "start-up":
            if time.monotonic() - begun >= kill.delay or place != "start-up":
                return
        elif place == kill.target and done >= kill.after_steps:
            time.sleep(kill.delay)
            return
        time.sleep(0.0002)


def carry_out(kill: Kill, folder: Path, processes) -> None:
    """Send the signal, and see how every rank ends."""
    wait_for(kill, folder, processes)
    signum, ranks = WAYS[kill.way]
    place, step, micro_batch, _ = state(folder, ranks[0])
    for rank in ranks:
        if processes[rank].is_alive():
            os.kill(processes[rank].pid, signum)
    deadline = time.monotonic() + 60
    while any(process.is_alive() for process in processes):
        ended = [process for process in processes if not process.is_alive()]
        # as torchrun does: a rank that is gone ends the others, which may be waiting for it to come
        if ended and time.monotonic() > deadline - 55:
            for process in processes:
                process.terminate()
        assert time.monotonic() < deadline, f"a rank hangs after {kill}"
        time.sleep(0.01)
    kill.statuses = tuple(process.exitcode for process in processes)
    if signum == signal.SIGKILL:  # nothing has moved since
        place, step, micro_batch, _ = state(folder, ranks[0])
    kill.met = place if place in ("start-up", "end") else f"{place} {step}" + (f".{micro_batch}" * (place == "step"))


def consumed(folder: Path, incarnation: int, rank: int) -> list[str]:
    path = folder / f"consumed-{incarnation:03d}-{rank}.txt"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if line.endswith("\n")]  # the last may have been cut


def one_log(folder: Path, incarnations: int, rank: int) -> list[str]:
    """What the run consumed, each incarnation cut at where the next one begins."""
    log: list[str] = []
    for incarnation in range(incarnations):
        lines = consumed(folder, incarnation, rank)
        if lines:
            first = int(lines[0].split()[0])
            log = [line for line in log if int(line.split()[0]) < first] + lines
    return log


def drawn(kills: int, seed: int) -> list[Kill]:
    """The seeded kills: every way, every place."""
    source = random.Random(seed)
    ways = [[*WAYS][i % len(WAYS)] for i in range(kills)]
    places = [PLACES[i % 4] for i in range(kills)]
    source.shuffle(ways)
    source.shuffle(places)
    return [
        Kill(
            way, place, after_steps=source.randint(0, 2 * STEPS_PER_KILL),
            delay=source.uniform(0.1, 0.8) if place == "start-up" else source.choice([0.0, source.uniform(0, 0.01)]),
        )
        for way, place in zip(ways, places, strict=True)
    ]  # fmt: skip


def soak(corpora: list[str], folder: Path, kills: int, seed: int = 0) -> list[Kill]:
    """Kill and resume; raises AssertionError where the run differs from one that was left alone.

    Returns:
        The kills, with what each met.
    """
    from tests.test_resume import assert_same_run

    alone, killed = folder / "alone", folder / "killed"
    for place in (alone, killed):
        place.mkdir()
    recipe_path = recipe(corpora, folder, steps=STEPS_PER_KILL * kills + 10)

    def finish(place, incarnation):
        processes = begin(place, recipe_path, incarnation)
        for process in processes:
            process.join(timeout=300)
        outputs = "".join((place / f"output-{rank}.txt").read_text() for rank in range(RANKS))
        assert [process.exitcode for process in processes] == [0] * RANKS, outputs

    finish(alone, 0)
    done = []
    for incarnation, kill in enumerate(drawn(kills, seed)):
        processes = begin(killed, recipe_path, incarnation)
        carry_out(kill, killed, processes)
        outputs = "".join((killed / f"output-{rank}.txt").read_text() for rank in range(RANKS))
        signum, ranks = WAYS[kill.way]
        if signum == signal.SIGKILL:
            assert all(kill.statuses[rank] in (-signal.SIGKILL, 0) for rank in ranks), (kill, outputs)
        elif kill.met not in ("start-up", "end"):
            assert set(kill.statuses) <= {128 + signum}, (kill, outputs)
            assert "stopped by" in outputs and "Traceback" not in outputs, (kill, outputs)
        saved = list_checkpoints(killed / "run/checkpoints")
        kill.resumed_at = int(saved[-1].stem.split("-")[1]) if saved else 0
        done.append(kill)
    finish(killed, kills)
    for rank in range(RANKS):
        assert one_log(killed, kills + 1, rank) == one_log(alone, 1, rank), f"rank {rank} has read something else"
    assert logged(killed / "run") == logged(alone / "run")
    assert_same_run(killed / "run", alone / "run")
    return done


def page(kills: list[Kill], seed: int, seconds: float, steps: int) -> str:
    """The log as Markdown."""
    met = Counter(kill.met.split()[0] for kill in kills)
    lines = [
        "# Killed and resumed",
        "",
        "`make soak`: a run of two processes (DDP, gloo), accumulation 2, three stages (bags of 4, 2, 1), a mixture of "
        f"two sources, {steps} steps, was ended {len(kills)} times at seeded moments (seed {seed}) and resumed each "
        f"time with `--ckpt_path last`, in {seconds:.0f} s. What each rank consumed, micro-batch by micro-batch, each "
        "incarnation cut at where the next begins, equals the log of a run that was left alone; so do `metrics.csv`, "
        "TensorBoard's events, the weights, the optimiser's state and the names of the checkpoints.",
        "",
        "Met: " + ", ".join(f"{count} in {place}" for place, count in sorted(met.items())) + ".",
        "",
        "`step 7.1` is the second micro-batch of step 7 (from 0). A status below 0 is the signal that ended the "
        "process; a rank whose peer was killed fails in its next collective (70, which stands for a traceback), or is "
        "ended, as torchrun does it (143).",
        "",
        "| # | what was sent | it met | exit statuses | goes on at step |",
        "|--:|---|---|---|--:|",
    ]
    lines += [
        f"| {i} | {kill.way} | {kill.met} | {', '.join(map(str, kill.statuses))} | {kill.resumed_at} |"
        for i, kill in enumerate(kills, 1)
    ]
    return "\n".join(lines) + "\n"


def corpora_of(text: Path, folder: Path) -> list[str]:
    """Two small corpora with one tokenizer."""
    from tst_lightning.data.prepare import prepare

    first = prepare(
        [text / f"{name}.py" for name in ("argparse", "ast", "calendar", "copy", "csv")], folder / "first",
        train_tokenizer=VOCABULARY, held_out=0.01,
    )  # fmt: skip
    prepare(
        [text / f"{name}.py" for name in ("heapq", "random", "dis", "bisect")], folder / "second",
        tokenizer=first.tokenizer_path, held_out=0.01,
    )  # fmt: skip
    return [str(folder / "first"), str(folder / "second")]


def main(kills: int = 60, log: str = "docs/soak.md", seed: int = 0) -> None:
    """Run it and write the log."""
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    corpora = corpora_of(Path(sysconfig.get_path("stdlib")), folder)
    started = time.monotonic()
    done = soak(corpora, folder, kills, seed)
    Path(log).write_text(page(done, seed, time.monotonic() - started, STEPS_PER_KILL * kills + 10))
    shutil.rmtree(folder)
    print(f"{kills} kills: the run equals one that was left alone; see {log}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:3])
