"""Reading a corpus, here and from S3, beside a bare memory map, LitData's own loader and a training step."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import timing
import torch
from litdata import StreamingDataLoader, StreamingDataset
from litdata.streaming import Cache, TemporalArrayLoader, TokensLoader
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tst_lightning import Transformer, TransformerConfig, decay_groups, next_bag_targets
from tst_lightning.batches import Batches
from tst_lightning.data.order import DataOrder
from tst_lightning.data.windows import TokenStream, WindowDataset, WindowLoader
from tst_lightning.phases import PhaseSchedule, Stage

RECORD = 2**20
LENGTHS = (1, 4, 16)
BATCH, LENGTH = 8, 64  # of the quickstart's step


def main() -> None:
    """Measure and report."""
    options = timing.parser(__doc__, repeats=10)
    options.add_argument("--length", type=timing.positive, default=1024, help="latent length: positions a window")
    options.add_argument("--batch", type=timing.positive, default=8, help="windows a micro-batch")
    options.add_argument("--batches", type=timing.positive, default=40, help="micro-batches a measurement")
    options.add_argument("--tokens", type=timing.positive, default=32 * RECORD, help="size of the corpus")
    options.add_argument("--remote", action="store_true", help="from an S3 server on loopback too (tests/s3.py)")
    given = timing.begin(options)
    with tempfile.TemporaryDirectory() as folder:
        tokens = np.random.default_rng(0).integers(0, 8192, given.tokens, dtype=np.uint16)
        local, flat = Path(folder, "corpus"), Path(folder, "corpus.bin")
        tokens.tofile(flat)
        cache = Cache(str(local), chunk_size=16, item_loader=TemporalArrayLoader())
        for record, start in enumerate(range(0, len(tokens), RECORD)):
            cache[record] = {"tokens": tokens[start : start + RECORD]}
        cache.done()
        cache.merge()

        cases: dict[str, Callable[[], object]] = {}
        for s in LENGTHS:
            window = s * given.length
            cases[f"memory map s={s}"] = memory_map(flat, window, given.batch, given.batches)
            cases[f"LitData s={s}"] = litdata(tokens, Path(folder, f"litdata-{s}"), window, given.batch, given.batches)
            cases[f"windows s={s}"] = windows(str(local), given.tokens, s, given)
        step, loader = "quickstart step", "quickstart windows"
        cases[step] = quickstart_step()
        cases[loader] = windows(str(local), given.tokens, 1, given, batch=BATCH, length=LENGTH)
        results = timing.measure(cases, given.device, given.repeats)
        ratios = {f"windows / {other} s={s}": timing.ratio(results, f"windows s={s}", f"{other} s={s}")
                  for s in LENGTHS for other in ("memory map", "LitData")}  # fmt: skip
        ratios["quickstart windows / step"] = timing.ratio(results, loader, step) / given.batches
        rates = {name: rate(results[name]["seconds"], name, given) for name in results if "s=" in name}
        if given.remote:
            rates |= remote(local, folder, given)
        for name, value in rates.items():
            print(f"{name:32} {value / 1e6:9.2f}M tokens/s")
        timing.report(given, results, ratios, tokens_per_second=rates)


def rate(seconds: list[float], name: str, given: argparse.Namespace) -> float:
    """Tokens a second."""
    s = int(name.rpartition("=")[2])
    return float(s * given.length * given.batch * given.batches / np.median(seconds))


def memory_map(path: Path, window: int, batch: int, batches: int) -> Callable[[], object]:
    """Windows at random places of a flat file, stacked: what nanoGPT does."""
    data, draw = np.memmap(path, np.uint16, "r"), np.random.default_rng(1)

    def read() -> None:
        for _ in range(batches):
            starts = draw.integers(0, len(data) - window, batch)
            torch.from_numpy(np.stack([data[start : start + window] for start in starts]))

    return read


def litdata(tokens: NDArray[np.uint16], folder: Path, window: int, batch: int, batches: int) -> Callable[[], object]:
    """LitData's own iteration in a random order, in the process."""
    cache = Cache(str(folder), chunk_bytes="64MB", item_loader=TokensLoader(window))
    for number, start in enumerate(range(0, len(tokens), RECORD)):
        cache[number] = torch.from_numpy(tokens[start : start + RECORD])
    cache.done()
    cache.merge()
    dataset = StreamingDataset(str(folder), item_loader=TokensLoader(window), shuffle=True)
    loader = iter(StreamingDataLoader(dataset, batch_size=batch))

    def read() -> None:
        nonlocal loader
        for _ in range(batches):
            if next(loader, None) is None:
                loader = iter(StreamingDataLoader(dataset, batch_size=batch))

    return read


def windows(
    directory: str,
    tokens: int,
    s: int,
    given: argparse.Namespace,
    *,
    batch: int | None = None,
    length: int | None = None,
    batches: int | None = None,
) -> Callable[[], object]:
    """What training reads."""
    batch = batch or given.batch
    length = length or given.length
    batches = batches or given.batches
    schedule = PhaseSchedule.from_stages([Stage(s, steps=10**6)] if s > 1 else [], 10**6 + 1)
    order = DataOrder(
        schedule, tokens=(tokens,), latent_length=length, batches=Batches.constant(batch), seed=0, unit_windows=48
    )
    stream = TokenStream(directory, tokens=tokens, record_tokens=RECORD)
    loader: DataLoader[Tensor] = WindowLoader(WindowDataset([stream], length), order)
    iterator = iter(loader)

    def read() -> None:
        for _ in range(batches):
            next(iterator)

    return read


def quickstart_step() -> Callable[[], object]:
    """One of 8 windows of 64 plain tokens, in the quickstart's network."""
    config = TransformerConfig(
        vocab_size=2048, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=2
    )
    model = Transformer(config)
    optimizer = torch.optim.AdamW(decay_groups(model.named_parameters()), lr=1e-5)
    tokens_BLS = torch.randint(config.vocab_size, (BATCH, LENGTH, 1))

    def step() -> None:
        optimizer.zero_grad()
        model(tokens_BLS, next_bag_targets(tokens_BLS)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def remote(local: Path, folder: str, given: argparse.Namespace) -> dict[str, float]:
    """Tokens a second from S3: by the clock, and by this process's own time, which is what the server leaves."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.s3 import S3Server  # the server needs the dev extra

    rates = {}
    with S3Server(Path(folder)) as server:
        os.environ.update(server.environment)
        import boto3

        client = boto3.client("s3")
        client.create_bucket(Bucket="corpora")
        for path in local.iterdir():
            client.upload_file(str(path), "corpora", f"corpus/{path.name}")
        tokens = given.tokens
        for latency in (0.0, 0.05):
            server.set(latency=latency)
            for s in LENGTHS:
                read = windows("s3://corpora/corpus", tokens, s, given)
                read()
                clock, own = time.perf_counter(), time.process_time()
                read()
                name = f"S3, {latency * 1000:.0f} ms"
                count = s * given.length * given.batch * given.batches
                rates[f"{name}, by the clock s={s}"] = count / (time.perf_counter() - clock)
                rates[f"{name}, own time s={s}"] = count / (time.process_time() - own)
    return rates


if __name__ == "__main__":
    main()
