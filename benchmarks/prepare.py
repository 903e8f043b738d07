"""The command `prepare` beside the tokenizers library alone: the same text, the same number of processes."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import get_context
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import timing
from tokenizers import Tokenizer
from tqdm import tqdm

from tst_lightning import prepare
from tst_lightning.data.tokenise import train_tokenizer

BATCH_CHARACTERS = 1 << 20


def main() -> None:
    """Measure and report."""
    cpus = len(os.sched_getaffinity(0))
    options = timing.parser(__doc__, repeats=3)
    options.add_argument("--megabytes", type=timing.positive, default=150, help="of text, as JSON Lines")
    options.add_argument("--vocab", type=timing.positive, default=8192, help="size of the tokenizer's vocabulary")
    options.add_argument(
        "--workers", type=timing.positive, nargs="+", default=sorted({1, cpus}), help="numbers of processes"
    )
    given = timing.begin(options)
    sources = [path.read_text(encoding="utf-8") for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]
    with tempfile.TemporaryDirectory() as folder:
        text, tokenizer, output = Path(folder, "text.jsonl"), Path(folder, "tokenizer.json"), Path(folder, "corpus")
        train_tokenizer(sources, given.vocab, tokenizer)
        characters = write_text(text, sources, given.megabytes * 10**6)
        cases: dict[str, Callable[[], tuple[float, float]]] = {}
        for workers in given.workers:
            cases[f"tokenizers, {workers} processes"] = partial(tokenise, text, tokenizer, workers)
            cases[f"prepare, {workers} processes"] = partial(prepare_corpus, text, tokenizer, workers, output)
        results = measure(cases, given.repeats)
    ratios = {
        f"prepare / tokenizers, {workers} processes": timing.ratio(
            results, f"prepare, {workers} processes", f"tokenizers, {workers} processes"
        )
        for workers in given.workers
    }
    rates = {name: characters / min(result["seconds"]) / 1e6 for name, result in results.items()}
    for name, rate in rates.items():
        print(f"{name:32} {rate:6.2f}M characters/s, {min(results[name]['cpu_seconds']):6.1f} s of CPU time")
    timing.report(given, results, ratios, characters=characters, megacharacters_per_second=rates)


def write_text(path: Path, sources: list[str], size: int) -> int:
    """The sources over and over, one a line."""
    characters = 0
    with path.open("w", encoding="utf-8") as file:
        while characters < size:
            for source in sources:
                file.write(json.dumps({"text": source}) + "\n")
                characters += len(source)
                if characters >= size:
                    break
    return characters


def measure(cases: dict[str, Callable[[], tuple[float, float]]], repeats: int) -> dict[str, dict[str, Any]]:
    """By the clock, in a new order each round; the CPU time of all processes beside it."""
    names = [*cases]
    results: dict[str, dict[str, Any]] = {name: {"seconds": [], "cpu_seconds": []} for name in names}
    order = random.Random(0)
    for _ in tqdm(range(repeats), unit="round", leave=False, file=sys.stderr):
        order.shuffle(names)
        for name in names:
            seconds, cpu_seconds = cases[name]()
            results[name]["seconds"].append(seconds)
            results[name]["cpu_seconds"].append(cpu_seconds)
    return results


def prepare_corpus(text: Path, tokenizer: Path, workers: int, output: Path) -> tuple[float, float]:
    """The whole command, from the start of its processes to the corpus on the disk."""
    before, start = children_seconds(), time.perf_counter()
    prepare(text, output, tokenizer=tokenizer, workers=workers, progress=False)
    seconds = time.perf_counter() - start
    shutil.rmtree(output)
    return seconds, children_seconds() - before


def children_seconds() -> float:
    """CPU time of the processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def tokenise(text: Path, tokenizer: Path, processes: int) -> tuple[float, float]:
    """Encode text that lies in memory, in processes of one thread; what they make is dropped."""
    context = get_context("spawn")
    ready, done = context.Barrier(processes + 1), context.Queue()
    workers = [
        context.Process(target=encode, args=(text, tokenizer, number, processes, ready, done))
        for number in range(processes)
    ]
    for worker in workers:
        worker.start()
    ready.wait()
    start = time.perf_counter()
    cpu_seconds = sum(done.get() for _ in workers)
    seconds = time.perf_counter() - start
    for worker in workers:
        worker.join()
    return seconds, cpu_seconds


def encode(text: Path, tokenizer: Path, number: int, processes: int, ready: Barrier, done: Queue[float]) -> None:
    """A process that encodes every so-many-th document."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    encoder = Tokenizer.from_file(str(tokenizer))
    with text.open(encoding="utf-8") as lines:
        documents = [json.loads(line)["text"] for index, line in enumerate(lines) if index % processes == number]
    ready.wait()
    start = time.process_time()
    for batch in batches(documents):
        encoder.encode_batch_fast(batch, add_special_tokens=False)
    done.put(time.process_time() - start)


def batches(documents: list[str]) -> Iterator[list[str]]:
    """Documents of about a million characters together."""
    batch: list[str] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    yield batch


if __name__ == "__main__":
    main()
