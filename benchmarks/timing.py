"""What the benchmarks share: interleaved timing on a noisy machine, and the report."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

WARM_UP = 2  # rounds
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def parser(description: str, repeats: int) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    options.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="what to measure on")
    options.add_argument("--dtype", choices=[*DTYPES], default="float32", help="what the products are computed in")
    options.add_argument("--threads", type=positive, default=1, help="of PyTorch on the CPU; their times are added up")
    options.add_argument("--repeats", type=positive, default=repeats, help="measurements of each case")
    options.add_argument("--json", type=Path, metavar="FILE", help="write the measurements there too")
    return options


def begin(options: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse, refuse what cannot work, and set PyTorch up."""
    given = options.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        options.error("--device cuda: PyTorch finds no CUDA device here (use --device cpu)")
    if given.json is not None:
        if not given.json.absolute().parent.is_dir():
            options.error(f"--json {given.json}: there is no folder {given.json.absolute().parent}")
        if not given.json.name or (given.json.exists() and not given.json.is_file()):
            options.error(f"--json {given.json} is no file that could be written")
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    return given


def measure(cases: Mapping[str, Callable[[], object]], device: str, repeats: int) -> dict[str, dict[str, Any]]:
    """Time each case ``repeats`` times, one after the other in a new order each round.

    Whatever else the machine does so falls on all of them alike. On a CPU the time is the process's own, which
    leaves other programs' shares out; on CUDA it is the device's, between two events.

    Returns:
        For each case its ``seconds``, one a round, and on CUDA ``peak_bytes``, what was allocated on top of what
        lay there before.
    """
    names = [*cases]
    results: dict[str, dict[str, Any]] = {name: {"seconds": []} for name in names}
    order = random.Random(0)
    for turn in tqdm(range(-WARM_UP, repeats), unit="round", leave=False, file=sys.stderr):
        order.shuffle(names)
        for name in names:
            seconds, peak_bytes = (_on_cuda if device == "cuda" else _on_cpu)(cases[name])
            if turn >= 0:
                results[name]["seconds"].append(seconds)
                if peak_bytes is not None:
                    results[name]["peak_bytes"] = peak_bytes
    return results


def _on_cpu(case: Callable[[], object]) -> tuple[float, None]:
    start = time.process_time()
    case()
    return time.process_time() - start, None


def _on_cuda(case: Callable[[], object]) -> tuple[float, int]:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    case()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000, torch.cuda.max_memory_allocated() - before


def ratio(results: dict[str, dict[str, Any]], case: str, base: str) -> float:
    """The median over the rounds of how much longer ``case`` took than ``base`` in the same round."""
    pairs = zip(results[case]["seconds"], results[base]["seconds"], strict=True)
    return float(statistics.median(a / b for a, b in pairs))


def report(
    given: argparse.Namespace, results: dict[str, dict[str, Any]], ratios: dict[str, float], **more: object
) -> None:
    """Print the table and, on the last line, the ratios; write the file if one is asked for."""
    width = max(map(len, results))
    print(f"{'':{width}}  {'median':>10} {'quartiles':>21} {'least':>10}")
    for name, result in results.items():
        seconds = result["seconds"]
        low, middle, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
        result["median"] = middle
        line = f"{name:{width}}  {middle * 1e3:7.2f} ms {low * 1e3:7.2f} to {high * 1e3:7.2f} ms"
        line += f" {min(seconds) * 1e3:7.2f} ms"
        if "peak_bytes" in result:
            line += f"  {result['peak_bytes'] / 2**20:8.0f} MiB"
        print(line)
    if given.json is not None:
        settings = {name: value for name, value in vars(given).items() if name != "json"}
        content = {"settings": settings, "machine": _machine(given), "cases": results, "ratios": ratios, **more}
        temporary = given.json.with_name(f"{given.json.name}.tmp")
        temporary.write_text(json.dumps(content, indent=2) + "\n")
        os.replace(temporary, given.json)
    print("ratios: " + ", ".join(f"{name} {value:.3g}" for name, value in ratios.items()))


def _machine(given: argparse.Namespace) -> dict[str, Any]:
    processor = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), processor)
    return {
        "processor": processor,
        "device": torch.cuda.get_device_name() if given.device == "cuda" else "cpu",
        "threads": given.threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
