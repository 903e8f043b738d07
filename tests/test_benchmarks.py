"""The benchmarks run and report; how fast is no matter here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TINY = {
    "loss.py": ["--vocab", "50", "--positions", "8", "--width", "4", "--bag-size", "3"],
    "step.py": [
        *["--vocab", "50", "--width", "8", "--inner", "8", "--layers", "1", "--heads", "2", "--length", "6"],
        *["--batch", "2", "--bag-size", "3"],
    ],
}


def run(script, *arguments, folder):
    return subprocess.run(
        [sys.executable, BENCHMARKS / script, *arguments], capture_output=True, text=True, cwd=folder, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "cases", "ratios"),
    [
        (
            "loss.py",
            {"floor", "ordinary", "fused s=1", "fused s=3", "loop s=3"},
            {"fused s=3 / ordinary", "fused s=3 / loop s=3"},
        ),
        ("step.py", {"plain", "superposition s=3"}, {"superposition s=3 / plain"}),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_benchmark_reports_its_ratios(script, cases, ratios, dtype, tmp_path):
    done = run(script, *TINY[script], "--dtype", dtype, "--repeats", "4", "--json", "out.json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "out.json").read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    assert set(content["cases"]) == cases
    for case in content["cases"].values():
        assert len(case["seconds"]) == 4 and min(case["seconds"]) <= case["median"] <= max(case["seconds"])
    assert ratios <= set(content["ratios"])
    assert content["settings"]["vocab"] == 50 and content["settings"]["bag_size"] == 3
    assert content["machine"]["torch"] and content["machine"]["processor"] and content["machine"]["threads"] == 1
    last = done.stdout.splitlines()[-1]
    assert last == "ratios: " + ", ".join(f"{name} {value:.3g}" for name, value in content["ratios"].items())


@pytest.mark.slow
def test_the_benchmark_of_prepare_reports_its_ratios(tmp_path):
    arguments = ["--megabytes", "1", "--vocab", "300", "--workers", "1", "2", "--repeats", "1", "--json", "out.json"]
    done = run("prepare.py", *arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "out.json").read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    assert set(content["ratios"]) == {f"prepare / tokenizers, {n} processes" for n in (1, 2)}
    assert len(content["cases"]) == 4 and all(case["cpu_seconds"][0] > 0 for case in content["cases"].values())
    assert content["characters"] >= 10**6


@pytest.fixture
def timing(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import timing

    return timing


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repeats", "0"], "--repeats: '0' is not a whole number of at least 1"),
        (["--repeats", "many"], "--repeats: 'many' is not a whole number of at least 1"),
        (["--device", "abacus"], "invalid choice: 'abacus'"),
        (["--rep", "3"], "unrecognized arguments: --rep 3"),
        (["--json", "/no/such/folder/out.json"], "there is no folder /no/such/folder"),
    ],
)
def test_wrong_arguments_are_told(arguments, message, timing, capsys):
    with pytest.raises(SystemExit) as stop:
        timing.begin(timing.parser("A benchmark.", repeats=5), arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_device_that_is_not_there(timing, monkeypatch, capsys):
    monkeypatch.setattr(timing.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        timing.begin(timing.parser("A benchmark.", repeats=5), ["--device", "cuda"])
    assert "--device cuda: PyTorch finds no CUDA device here" in capsys.readouterr().err


@pytest.mark.slow
def test_a_network_that_cannot_be(tmp_path):
    done = run("step.py", "--width", "10", "--heads", "3", folder=tmp_path)
    assert done.returncode == 2
    assert "hidden_size=10 is not a multiple of num_attention_heads=3" in done.stderr
    assert "Traceback" not in done.stderr


def test_each_case_is_measured_once_a_round_in_changing_order(timing, monkeypatch):
    seen = []
    clock = iter(range(1000))
    monkeypatch.setattr(timing.time, "process_time", lambda: next(clock))
    cases = {name: lambda name=name: seen.append(name) for name in "abc"}
    results = timing.measure(cases, "cpu", repeats=9)
    rounds = [seen[i : i + 3] for i in range(0, len(seen), 3)]
    assert len(rounds) == 9 + timing.WARM_UP and all(sorted(turn) == ["a", "b", "c"] for turn in rounds)
    assert len({tuple(turn) for turn in rounds}) > 2
    assert all(result["seconds"] == [1] * 9 for result in results.values())  # the clock's own ticks


def test_a_ratio_is_the_median_of_those_within_a_round(timing):
    results = {"slow": {"seconds": [2.0, 30.0, 6.0]}, "fast": {"seconds": [1.0, 10.0, 2.0]}}
    assert timing.ratio(results, "slow", "fast") == 3.0
