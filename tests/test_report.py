"""The report, from small runs made by hand whose answers are known."""

import csv
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tst_lightning import __version__
from tst_lightning.__main__ import main
from tst_lightning.report.command import make_report
from tst_lightning.report.find import find_runs, names
from tst_lightning.report.page import as_json, markdown, plain
from tst_lightning.report.runs import Run
from tst_lightning.report.words import sentences
from tst_lightning.text import count

GOLDEN = Path(__file__).parent / "golden" / "report"

METRICS = """\
grad_norm,lr,phase/bag_size,step,tokens/data,tokens/latent,train/loss,train/superposition_loss,val/loss,val/perplexity
1.5,0.1,4,1,2048,512,,7.6,,
1.4,0.1,4,2,4096,1024,,7.5,,
,,,2,,,,,7.25,1408.1
1.2,0.1,1,3,4608,1536,7.0,,,
,,,3,,,,,6.5,665.1
"""

COLUMNS = [
    "compute/flops", "phase/bag_size", "step", "time/wall_clock", "tokens/data", "tokens/latent",
    "train/loss", "train/superposition_loss", "val/loss",
]  # fmt: skip
TOKENS, FLOPS = 512, 512 * 2_000_000  # a step


def write_run(folder, losses, *, bag_size=1, switch=0, steps=None, seed=1, done=None, train_loss=5.0, **settings):
    """A run of ``steps`` steps (by default as many as it has validations for) with held-out ``losses`` by step.

    ``settings`` are of ``run.json``, such as ``optimisation__lr=3e-3``.
    """
    folder.mkdir(parents=True)
    steps = steps or max(losses)
    record = {
        "format": 1,
        "version": "0.1.0",
        "schedule": {"phases": [[bag_size, 0, switch], [1, switch, steps]] if switch else [[1, 0, steps]]},
        "network": {"hidden_size": 64, "vocab_size": 2048},
        "optimisation": {"weighting": "uniform", "warmup_steps": 20, "optimizer.lr": 1.5e-3},
        "data": {
            "seed": seed, "tokens": [9_000_000], "weights": ["1"], "latent_length": 64, "global_batch_size": 8,
            "held_out_sha256": ["cd" * 32], "tokenizer_sha256": "ab" * 32,
        },
        "validation": {"limit_val_batches": 1.0},
        "seed": seed,
        "parameters": 370_000,
        "flops_per_latent_token": 2_000_000,
        "machine": {"device": "cpu", "precision": "32-true", "processes": 1, "torch": "2.14.1"},
    }  # fmt: skip
    for setting, value in settings.items():
        section, _, name = setting.rpartition("__")
        (record[section] if section else record)[name] = value
    (folder / "run.json").write_text(json.dumps(record, indent=2) + "\n")
    rows, data = [], 0
    for step in range(1, (done or steps) + 1):
        bag = bag_size if step <= switch else 1
        data += bag * TOKENS
        if step % 20 == 0 or step in (1, switch, switch + 1, steps):
            rows.append(
                {
                    "compute/flops": step * FLOPS, "phase/bag_size": bag, "step": step, "time/wall_clock": step * 0.5,
                    "tokens/data": data, "tokens/latent": step * TOKENS,
                    "train/loss" if bag == 1 else "train/superposition_loss": train_loss,
                }
            )  # fmt: skip
        if step in losses:
            rows.append({"step": step, "val/loss": losses[step]})
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return folder


def every(step, total, loss):
    """Losses at every multiple of ``step``."""
    return {n: loss(n) for n in range(step, total + 1, step)}


def curve(end, total=100, step=20):
    """A validation curve that falls by 0.5 nats an e-fold of steps to ``end``."""
    return every(step, total, lambda n: round(end + 0.5 * math.log(total / n), 6))


@pytest.fixture
def run(tmp_path):
    (tmp_path / "tst").mkdir()
    (tmp_path / "tst" / "metrics.csv").write_text(METRICS)
    return tmp_path / "tst"


def comparison_of(*folders, baseline=None):
    """The one comparison of these runs."""
    (comparison,) = make_report([str(folder) for folder in folders], baseline=baseline).comparisons
    return comparison


# --- reading one run ---------------------------------------------------------------------------------------------


def test_what_a_run_says(run):
    read = Run.read(run, "tst")
    assert (read.steps, read.latent_tokens, read.data_tokens, read.bag_size) == (3, 1536, 4608, 4)
    assert (read.val_loss, read.val_step, read.flops, read.wall_clock, read.recipe) == (6.5, 3, None, None, None)
    assert read.validations == ((2, 4096, 7.25), (3, 4608, 6.5))
    assert read.finished is None and read.total_steps is None


def test_tokens_between_the_rows_are_exact(tmp_path):
    """Validated where no training row was written: 4 x 30 steps and then plain ones, and after the last row."""
    folder = write_run(tmp_path / "a", {7: 6.0, 30: 5.5, 37: 5.0, 59: 4.9}, bag_size=4, switch=30, steps=80, done=59)
    assert [v.data_tokens / TOKENS for v in Run.read(folder, "a").validations] == [28, 120, 127, 149]


def test_where_the_switch_is_in_tokens(tmp_path):
    read = Run.read(write_run(tmp_path / "a", {100: 4.0}, bag_size=4, switch=30, done=60, steps=100), "a")
    assert read.switch_steps == (30,) and read.tokens_before(30) == 120 * TOKENS
    early = Run.read(write_run(tmp_path / "b", {}, bag_size=4, switch=30, done=20, steps=100), "b")
    assert early.switch_steps == ()


def test_table(run, capsys):
    assert main(["report", str(run)]) == 0
    header, rule, row, *_ = capsys.readouterr().out.splitlines()
    assert header.split("  ")[0] == "run" and set(rule) <= {"-", " "}
    assert row.split() == ["tst", "4", "3", "1.54k", "4.61k", "6.5000"]


def test_costs_have_a_column_where_they_are_known(run, tmp_path):
    write_run(run.parent / "long", {8000: 4.0})
    table = plain(make_report([str(tmp_path)])).splitlines()
    assert table[0].split("  ")[-1] == "held-out loss (nats/token)" and "FLOPs" in table[0] and "wall clock" in table[0]
    assert table[2].split() == ["long", "1", "8000", "4.1M", "4.1M", "8.19e+12", "1:06:40", "4.0000"]
    assert table[3].split() == ["tst", "4", "3", "1.54k", "4.61k", "-", "-", "6.5000"]


def test_an_unfinished_run_says_where_its_loss_is_from(run, capsys):
    (run / "metrics.csv").write_text("\n".join(METRICS.splitlines()[:-1]) + "\n")
    main(["report", str(run)])
    assert "7.2500 (at step 2)" in capsys.readouterr().out


def test_every_fault_at_once(run, tmp_path, capsys):
    (tmp_path / "started").mkdir()
    (tmp_path / "started" / "metrics.csv").write_text("step,val/loss\n")
    (tmp_path / "promised").mkdir()
    (tmp_path / "promised" / "run.json").write_text("{}")
    places = [tmp_path / name for name in ("nowhere", "started", "promised", "empty", "tst/metrics.csv")]
    (tmp_path / "empty").mkdir()
    assert main(["report", str(run), *map(str, places)]) == 2
    output, error = capsys.readouterr()
    assert "6.5000" in output  # the others are shown all the same
    lines = sorted(error.replace(f"{tmp_path}/", "").splitlines())
    assert lines == [
        "error: empty holds no run (no metrics.csv in it or below)",
        "error: nowhere holds no run: there is no such folder",
        "error: promised: the run has not logged a training step yet",
        "error: started: the run has not logged a training step yet",
        "error: tst/metrics.csv is a file: give the run's directory",
    ]


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (512, "512"), (999, "999"), (1000, "1k"), (6144, "6.14k"), (999_499, "999k"), (999_600, "1M"),
     (24_576_000, "24.6M"), (75.5e9, "75.5B"), (1.05e12, "1.05T"), (2.5e15, "2.5e+03T")],
)  # fmt: skip
def test_counts(number, text):
    assert count(number) == text


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text.replace(",3,", ",three,"), "is damaged"),
        (lambda text: text.replace("4,2,4096", "4,nan,4096"), "is damaged"),
        (lambda text: text.replace("4,2,4096", "4,-2,4096"), "do not ascend"),
        (lambda text: text.replace("7.25", "low"), "is damaged"),
        (lambda text: text.replace("tokens/data", "tokens/else"), "is damaged"),
        (lambda text: text.replace("\n1.2,", "\n1.2,9,9,"), "more or fewer values"),
        (lambda text: "\xff" + text, "cannot be read"),
    ],
)
def test_a_damaged_log_is_named(damage, message, run, capsys):
    (run / "metrics.csv").write_bytes(damage(METRICS).encode("latin-1"))
    assert main(["report", str(run)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda record: "{", "is damaged"),
        (lambda record: "[]", "is damaged"),
        (lambda record: json.dumps({**record, "format": 2}), "format 2, and this version reads 1"),
        (lambda record: json.dumps({**record, "schedule": {"phases": []}}), "is damaged"),
        (lambda record: json.dumps({**record, "schedule": {"phases": [[1, 5, 9]]}}), "is damaged"),
        (lambda record: json.dumps({**record, "schedule": {"phases": [[1, 0, 50]]}}), "step 100 of the 50 in run.json"),
        (lambda record: json.dumps({k: v for k, v in record.items() if k != "seed"}), "is damaged"),
        (lambda record: json.dumps({**record, "machine": "cpu"}), "is damaged"),
        (lambda record: json.dumps({**record, "seed": [1]}), "is damaged"),
        (lambda record: json.dumps({**record, "schedule": {"phases": [[math.inf, 0, 100]]}}), "is damaged"),
        (lambda record: "[" * 100_000, "is damaged"),
    ],
)
def test_a_damaged_record_is_named_and_the_others_are_shown(damage, message, tmp_path, capsys):
    folder = write_run(tmp_path / "a", curve(4.0))
    write_run(tmp_path / "b", curve(4.25))
    (folder / "run.json").write_text(damage(json.loads((folder / "run.json").read_text())))
    assert main(["report", str(tmp_path)]) == 2
    output, error = capsys.readouterr()
    assert message in error and error.count("error:") == 1 and "4.2500" in output and "4.0000" not in output


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("compute/flops", "1e400"), ("compute/flops", "1e999999999"), ("compute/flops", "-5"), ("compute/flops", "nan"),
        ("time/wall_clock", "-1"), ("time/wall_clock", "inf"), ("tokens/data", "-5"), ("tokens/latent", "-5"),
        ("train/loss", '"' + "x" * 200_000 + '"'),
    ],
)  # fmt: skip
def test_an_impossible_value_is_damage(column, value, tmp_path, capsys):
    run = write_run(tmp_path / "odd", curve(4.0))
    *rows, last = [line.split(",") for line in (run / "metrics.csv").read_text().splitlines() if line.endswith(",")]
    last[COLUMNS.index(column)] = value
    (run / "metrics.csv").write_text("\n".join(",".join(row) for row in [COLUMNS, *rows, last]) + "\n")
    other = write_run(tmp_path / "other", curve(4.0))
    assert main(["report", str(run), str(other)]) == 2
    output, error = capsys.readouterr()
    assert "metrics.csv is damaged" in error and "Traceback" not in error
    assert output.splitlines()[2].startswith("other ")


def test_a_run_that_went_on_elsewhere_keeps_its_bag_size(tmp_path):
    """Its log begins at the checkpoint's step, behind the switch."""
    run = write_run(tmp_path / "tst", curve(4.0), bag_size=4, switch=30)
    header, *rows = (run / "metrics.csv").read_text().splitlines()
    step = COLUMNS.index("step")
    later = [row for row in rows if int(row.split(",")[step]) > 60]
    (run / "metrics.csv").write_text("\n".join([header, *later]) + "\n")
    assert Run.read(run, "tst").bag_size == 4


def test_paths_that_make_no_sense(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "tst", curve(4.0))
    for arguments in (["report", ""], ["report", "tst", "--output", ""]):
        assert main(arguments) == 2
        assert "an empty path was given" in capsys.readouterr().err
    assert main(["report", "tst", "x" * 300]) == 2
    assert "cannot be read" in capsys.readouterr().err
    os.mkfifo("tst/run.json.new")
    os.replace("tst/run.json.new", "tst/run.json")  # nobody will ever write to it
    assert main(["report", "tst"]) == 0
    assert "no run.json" in capsys.readouterr().out


def test_a_path_that_is_no_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "tst", curve(4.0))
    output = os.fsdecode(b"page\xff")
    assert main(["report", "tst", "--output", output]) == 0
    assert "page\\udcff" in (tmp_path / output / "report.md").read_text(encoding="utf-8")


def test_a_closed_output_is_no_fault(run):
    command = f"exec {sys.executable} -m tst_lightning report {run} >&-"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("cut", range(1, 10))
def test_a_row_that_is_being_written_is_not_read(cut, run):
    (run / "metrics.csv").write_text(METRICS[:-cut])
    assert Run.read(run, "tst").val_loss == 7.25


# --- finding and naming ------------------------------------------------------------------------------------------


def test_a_folder_is_searched_and_each_run_is_taken_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b/tst", "b/tst/checkpoints/x", "b/tst/abandoned-1", "a/abandoned-2", "a/checkpoints", "a/deep/er"):
        Path(name).mkdir(parents=True, exist_ok=True)
        (Path(name) / "metrics.csv").write_text(METRICS)
    Path("a/round").symlink_to("..", target_is_directory=True)
    Path("again").symlink_to("b/tst", target_is_directory=True)
    assert find_runs(["."]) == ([Path("a/deep/er"), Path("again")], [])
    assert find_runs(["b/tst", "b/tst/", str(tmp_path / "b"), "b"]) == ([Path("b/tst")], [])
    assert find_runs(["a/abandoned-2"]) == ([Path("a/abandoned-2")], [])  # where it is asked for


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["/r/tst", "/r/baseline"], ["tst", "baseline"]),
        (["/r/1/tst", "/r/2/tst", "/r/1/base"], ["1/tst", "2/tst", "base"]),
        (["/r/1/x/tst", "/r/2/x/tst", "/r/x/tst"], ["1/x/tst", "2/x/tst", "r/x/tst"]),
        (["/tst", "/r/tst"], ["/tst", "r/tst"]),
        (["/r/a\nb\udcff"], ["a\\nb\\udcff"]),
    ],
)
def test_names_are_the_shortest_unambiguous_paths(paths, expected):
    assert names([Path(path) for path in paths]) == expected


def test_the_working_directory_has_a_name(run, monkeypatch):
    monkeypatch.chdir(run)
    assert make_report(["."]).runs[0].name == "tst"


def test_groups_are_named_by_what_their_runs_share(tmp_path):
    for seed in (1, 2):
        write_run(tmp_path / f"seed-{seed}/tst", curve(4.0), bag_size=4, switch=20, seed=seed)
        write_run(tmp_path / f"flat/tst-{seed}-x", curve(4.0), bag_size=2, switch=20, seed=seed)
        write_run(tmp_path / f"{'ab'[seed - 1]}", curve(4.0), bag_size=8, switch=20, seed=seed)
    labels = {group.label for group in make_report([str(tmp_path)]).groups}
    assert labels == {"tst", "tst-*-x", "a, b"}


# --- who is compared with whom -----------------------------------------------------------------------------------


def test_three_seeds(tmp_path):
    """Differences of -0.1, -0.2 and -0.3 by hand."""
    for seed, arm in ((1, 3.9), (2, 3.9), (3, 3.7)):
        write_run(tmp_path / f"{seed}/tst", curve(arm), bag_size=4, switch=20, seed=seed)
        write_run(tmp_path / f"{seed}/base", curve({1: 4.0, 2: 4.1, 3: 4.0}[seed]), seed=seed)
    comparison = comparison_of(tmp_path)
    assert [pair.difference for pair in comparison.pairs] == pytest.approx([-0.1, -0.2, -0.3], abs=1e-9)
    assert comparison.mean_difference == pytest.approx(-0.2)
    assert comparison.spread == pytest.approx(0.1)
    assert comparison.baseline_spread == pytest.approx(0.1 / math.sqrt(3))
    assert comparison.equal_flops is True
    assert sentences(comparison)[0] == (
        "tst is ahead of base by 0.2000 nats/token on average, ahead in all 3 seeds (differences -0.3000 to -0.1000). "
        "The mean difference is larger than the spread of the differences over seeds (standard deviation 0.1000); the "
        "baseline itself moves between seeds by a standard deviation of 0.0577."
    )


@pytest.mark.parametrize(
    ("arms", "bases", "words"),
    [
        ([4.2], [4.0], "tst is behind base by 0.2000 nats/token (4.2000 against 4.0000). One seed: that cannot"),
        ([3.8], [4.0], "tst is ahead of base by 0.2000 nats/token (3.8000 against 4.0000). One seed: that cannot"),
        ([4.0], [4.0], "tst is level with base to four decimals (4.0000 against 4.0000). One seed"),
        ([4.1, 3.8], [4.0, 4.0], "tst is ahead of base by 0.0500 nats/token on average, ahead in 1 of 2 seeds"),
        ([4.2, 4.3, 4.4], [4.0] * 3, "tst is behind base by 0.3000 nats/token on average, behind in all 3 seeds"),
    ],
)
def test_the_verdict_favours_nobody(arms, bases, words, tmp_path):
    for seed, (arm, base) in enumerate(zip(arms, bases, strict=True)):
        write_run(tmp_path / f"{seed}/tst", curve(arm), bag_size=4, switch=20, seed=seed)
        write_run(tmp_path / f"{seed}/base", curve(base), seed=seed)
    assert sentences(comparison_of(tmp_path))[0].startswith(words)


def test_a_mean_within_the_spread_is_said_to_be(tmp_path):
    for seed, arm in enumerate([4.2, 3.7, 4.0]):
        write_run(tmp_path / f"{seed}/tst", curve(arm), bag_size=4, switch=20, seed=seed)
        write_run(tmp_path / f"{seed}/base", curve(4.0), seed=seed)
    assert "The mean difference is not larger than the spread" in sentences(comparison_of(tmp_path))[0]


def test_unpaired_and_repeated_seeds_are_named_and_left_out(tmp_path):
    for name, seed in (("tst-1", 1), ("tst-2", 2), ("tst-2-again", 2), ("tst-4", 4)):
        write_run(tmp_path / name, curve(3.9 if name != "tst-2-again" else 1.0), bag_size=4, switch=20, seed=seed)
    for seed in (1, 2, 3):
        write_run(tmp_path / f"base-{seed}", curve(4.0), seed=seed)
    report = make_report([str(tmp_path)])
    (comparison,) = report.comparisons
    assert [(p.arm.name, p.baseline.name) for p in comparison.pairs] == [("tst-1", "base-1"), ("tst-2", "base-2")]
    assert [run.name for run in comparison.unpaired] == ["tst-4", "base-3"]
    assert any("tst-4 (seed 4), base-3 (seed 3)" in sentence for sentence in sentences(comparison))
    assert report.notes == ("tst-2-again is not counted: it has the seeds of tst-2 (2)",)
    assert comparison.mean_difference == pytest.approx(-0.1)


def test_no_seed_in_common(tmp_path):
    tst = write_run(tmp_path / "tst", curve(3.9), bag_size=4, switch=20, seed=1)
    comparison = comparison_of(tst, write_run(tmp_path / "base", curve(4.0), seed=2))
    assert comparison.mean_difference is None and comparison.spread is None
    assert sentences(comparison)[0] == "The two have no seed in common: their losses are not compared."
    assert "no baseline shares a seed" in comparison.equal_loss.reason


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"steps": 100, "done": 60}, "tst is compared with nothing: it is at step 60 of 100"),
        ({"steps": 110}, "tst is compared with nothing: it was not validated at its last step, 110"),
        (
            {"losses": {50: 4.0, 100: math.nan}},
            "tst is compared with nothing: its loss is no finite number at step 100",
        ),
        ({"losses": {50: math.inf, 100: 4.0}}, "tst is compared with nothing: its loss is no finite number at step 50"),
        ({"train_loss": math.nan}, "tst is compared with nothing: its loss is no finite number at step 1"),
    ],
)
def test_a_run_that_cannot_be_compared_is_named_and_shown(how, reason, tmp_path, capsys):
    write_run(tmp_path / "base", curve(4.0))
    losses = how.pop("losses", curve(3.9))
    write_run(tmp_path / "tst", losses, bag_size=4, switch=20, **how)
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "report")]) == 0
    output = capsys.readouterr().out
    assert f"note: {reason}" in output and output.count("\ntst ") == 1 and " against " not in output
    document = json.loads((tmp_path / "report/report.json").read_text(), parse_constant=pytest.fail)
    assert document["comparisons"] == [] and document["problems"] == [] and reason in document["notes"]
    assert document["runs"][1]["not_compared"] in reason


def test_a_run_without_a_record_is_shown_and_compared_with_nothing(run, tmp_path):
    write_run(tmp_path / "base", {3: 6.0})
    report = make_report([str(tmp_path)])
    assert report.comparisons == ()
    assert "tst is compared with nothing: no run.json says how it was trained" in report.notes
    assert [run.name for run in report.runs] == ["base", "tst"]


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("data__tokenizer_sha256", "cd" * 32, "data.tokenizer_sha256 cdcdcdcdcdcd... against abababababab..."),
        ("data__weights", ["1/2", "1/2"], 'data.weights ["1/2", "1/2"] against ["1"]'),
        ("data__latent_length", 128, "data.latent_length 128 against 64"),
        ("data__tokenizer_sha256", None, "data.tokenizer_sha256 is not recorded"),
    ],
)
@pytest.mark.parametrize("named", [None, "base"])
def test_other_nats_are_never_compared(setting, value, words, named, tmp_path):
    write_run(tmp_path / "base", curve(4.0))
    write_run(tmp_path / "tst", curve(3.9), bag_size=4, switch=20, **{setting: value})
    report = make_report([str(tmp_path)], baseline=named)
    assert report.comparisons == ()
    assert f"tst and base are not compared: a nat a token cannot be taken to be the same thing in both ({words})" in (
        report.notes
    )


def test_losses_of_unknown_text_are_not_compared_either(tmp_path):
    write_run(tmp_path / "base", curve(4.0), data__held_out_sha256=None)
    write_run(tmp_path / "tst", curve(3.9), bag_size=4, switch=20, data__held_out_sha256=None)
    report = make_report([str(tmp_path)])
    assert report.comparisons == () and "(data.held_out_sha256 is not recorded)" in report.notes[0]


DIFFERENT = {
    "optimisation__optimizer.lr": (3e-3, "optimisation.optimizer.lr 0.003 against 0.0015", True),
    "network__hidden_size": (128, "network.hidden_size 128 against 64", None),
    "data__global_batch_size": (16, "data.global_batch_size 16 against 8", None),
    "machine__precision": ("bf16-true", "machine.precision bf16-true against 32-true", True),
    "optimisation__gradient_clip_val": (1.0, "optimisation.gradient_clip_val 1.0 against none", True),
}


@pytest.mark.parametrize("setting", DIFFERENT)
def test_another_recipe_is_compared_only_by_name(setting, tmp_path):
    value, words, equal_flops = DIFFERENT[setting]
    write_run(tmp_path / "base", curve(4.0))
    write_run(tmp_path / "tst", curve(3.9), bag_size=4, switch=20, **{setting: value})
    report = make_report([str(tmp_path)])
    assert report.comparisons == ()
    assert f"The nearest, base, differs in {words}." in report.notes[0]

    comparison = comparison_of(tmp_path, baseline="base")
    assert list(map(str, comparison.differences)) == [words]
    assert comparison.mean_difference == pytest.approx(-0.1)
    said = " ".join(sentences(comparison))
    assert "Equal FLOPs: one recipe" not in said and f"They differ in {words}." in said
    if equal_flops:  # a step costs the same
        assert comparison.equal_flops is True and "a longer one" in comparison.equal_loss.reason
    else:
        assert "costs other FLOPs" in comparison.equal_loss.reason


def test_a_named_baseline_of_another_length_has_other_flops(tmp_path):
    write_run(tmp_path / "base", curve(4.0, 200))
    write_run(tmp_path / "tst", curve(3.9), bag_size=4, switch=20)
    comparison = comparison_of(tmp_path, baseline="base")
    assert comparison.equal_flops is False and comparison.mean_difference == pytest.approx(-0.1)
    assert sentences(comparison)[1] == "Two recipes, at other FLOPs. They differ in total_steps 100 against 200."


def test_the_nearest_baseline_is_named(tmp_path):
    write_run(tmp_path / "far", curve(4.0), optimisation__warmup_steps=9, network__hidden_size=8)
    write_run(tmp_path / "near", curve(4.0), optimisation__warmup_steps=9)
    write_run(tmp_path / "tst", curve(3.9), bag_size=4, switch=20)
    assert (
        "The nearest, near, differs in optimisation.warmup_steps 20 against 9."
        in (make_report([str(tmp_path)]).notes[0])
    )


def test_the_weighting_of_a_bag_is_none_of_a_baselines_business(tmp_path):
    write_run(tmp_path / "base", curve(4.0))
    write_run(tmp_path / "even", curve(3.9), bag_size=4, switch=20)
    write_run(tmp_path / "uneven", curve(3.8), bag_size=4, switch=20, optimisation__weighting="power_law")
    comparisons = make_report([str(tmp_path)]).comparisons
    assert [(c.arm.label, c.baseline.label) for c in comparisons] == [("even", "base"), ("uneven", "base")]
    write_run(tmp_path / "2/base", curve(4.2), seed=2, optimisation__weighting="power_law")
    assert [len(group.runs) for group in make_report([str(tmp_path)]).groups] == [2, 1, 1]  # two seeds of one baseline
    named = make_report([str(tmp_path)], baseline="even").comparisons
    assert list(map(str, named[0].differences)) == ["optimisation.weighting power_law against uniform"]


@pytest.mark.parametrize("how", ["base", "label", "path"])
def test_a_baseline_by_name_label_or_directory(how, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed in (1, 2):
        write_run(Path(f"{seed}/base"), curve(4.0), seed=seed)
        write_run(Path(f"{seed}/tst"), curve(3.9), bag_size=4, switch=20, seed=seed)
    named = {"base": "1/base", "label": "base", "path": "../" + tmp_path.name + "/2/base"}[how]
    assert len(comparison_of(".", baseline=named).pairs) == 2


def test_an_unknown_baseline_is_refused_before_anything_is_written(tmp_path, capsys):
    write_run(tmp_path / "tst", curve(4.0))
    arguments = ["report", str(tmp_path / "tst"), str(tmp_path / "no"), "--baseline", "bse", "--output"]
    assert main([*arguments, str(tmp_path / "report")]) == 2
    output, error = capsys.readouterr()
    assert "--baseline bse is none of the runs: choose one of tst" in error and "no holds no run" in error
    assert output == "" and not (tmp_path / "report").exists()


def test_machines_and_versions_that_differ_are_named(tmp_path):
    write_run(tmp_path / "base", curve(4.0), version="0.2.0")
    write_run(tmp_path / "tst", curve(3.9), bag_size=4, switch=20, machine__device="NVIDIA H200")
    report = make_report([str(tmp_path)])
    assert len(report.comparisons) == 1  # still one recipe
    assert report.notes == (
        "wall clocks are not comparable: the runs were trained on 1 x cpu, 1 x NVIDIA H200",
        "the runs were trained by different software: tst_lightning 0.2.0 with torch 2.14.1, tst_lightning 0.1.0 with "
        "torch 2.14.1",
    )


# --- equal loss --------------------------------------------------------------------------------------------------


def test_equal_loss_between_finished_baselines(tmp_path):
    """Baselines that end at 8 - 0.5 ln(steps): an arm with the loss of 200 steps is worth exactly 200."""
    for steps in (100, 400, 1600):
        losses = {steps // 2: 9.0, steps: 8 - 0.5 * math.log(steps)}
        write_run(tmp_path / f"base-{steps}", losses, steps=steps)
    write_run(tmp_path / "tst", {50: 9.5, 100: 8 - 0.5 * math.log(200)}, bag_size=4, switch=20)
    comparison = comparison_of(tmp_path)
    found = comparison.equal_loss
    assert (found.baseline_steps, found.speed_up) == (pytest.approx(200), pytest.approx(2))
    assert found.method == "between finished baselines" and found.baselines == ("base-100", "base-400")
    assert comparison.baseline.label == "base-100"  # of as many steps
    assert "a speed-up, 2.00x" in sentences(comparison)[-1] and "flatters" not in sentences(comparison)[-1]


def test_equal_loss_of_an_arm_without_a_baseline_of_its_length(tmp_path):
    for steps in (100, 400):
        write_run(tmp_path / f"base-{steps}", {steps: 8 - 0.5 * math.log(steps)})
    write_run(tmp_path / "tst", {300: 8 - 0.5 * math.log(200)}, bag_size=4, switch=20)
    comparison = comparison_of(tmp_path)
    assert comparison.baseline is None and comparison.pairs == () and comparison.equal_flops is None
    assert comparison.equal_loss.speed_up == pytest.approx(200 / 300)
    assert "a slow-down, 0.67x" in sentences(comparison)[-1]
    assert sentences(comparison)[0].startswith("No baseline of the same recipe has 300 steps")


def test_equal_loss_on_one_baselines_curve(tmp_path):
    """The first crossing of 4.5, a quarter of the way from 4.6 at step 60 to 4.2 at step 80, in log steps."""
    base = write_run(tmp_path / "base", {20: 6.0, 40: 5.0, 60: 4.6, 80: 4.2, 100: 4.0})
    comparison = comparison_of(base, write_run(tmp_path / "tst", {100: 4.5}, bag_size=4, switch=20))
    found = comparison.equal_loss
    assert (found.baseline_steps, found.speed_up) == (
        pytest.approx(steps := 60 * (4 / 3) ** 0.25),
        pytest.approx(steps / 100),
    )
    assert found.method == "on the baseline's own curve"
    assert "a slow-down, 0.64x" in sentences(comparison)[-1]
    assert "had not decayed to its end there, so the figure flatters tst" in sentences(comparison)[-1]


def test_equal_loss_above_every_baselines_end_is_read_off_the_shortest(tmp_path):
    """Half-way from 6.0 at step 60 to 4.0 at step 120, in log steps, for an arm of 100 steps."""
    write_run(tmp_path / "longer", {10: 7.0, 20: 4.0, 240: 3.0})
    write_run(tmp_path / "base", {60: 6.0, 120: 4.0})
    write_run(tmp_path / "tst", {100: 5.0}, bag_size=4, switch=20)
    found = comparison_of(tmp_path).equal_loss
    assert found.baselines == ("base",)
    assert (found.baseline_steps, found.speed_up) == (pytest.approx(60 * 2**0.5), pytest.approx(0.6 * 2**0.5))


def test_equal_loss_on_the_mean_curve_of_paired_seeds(tmp_path):
    """Means of 5.0 at step 50 and 4.0 at 100 cross 4.25, the arms' mean; the third seed is not paired."""
    for seed, shift in ((1, 0.2), (2, -0.2)):
        losses = {50: 5.0 + shift, 75: 9.9, 100: 4.0 + shift} if seed == 1 else {50: 5.0 + shift, 100: 4.0 + shift}
        write_run(tmp_path / f"{seed}/base", losses, seed=seed)
        write_run(tmp_path / f"{seed}/tst", {100: 4.25 + 3 * shift}, bag_size=4, switch=20, seed=seed)
    write_run(tmp_path / "3/tst", {100: 1.0}, bag_size=4, switch=20, seed=3)
    comparison = comparison_of(tmp_path)
    assert comparison.equal_loss.baseline_steps == pytest.approx(50 * 2**0.75)
    assert "(over seeds 1, 2 only)" in sentences(comparison)[-1]


def test_a_better_baseline_of_another_recipe_is_named(tmp_path):
    """Else the arm would look better than it is beside a baseline that happens to be in the same report."""
    write_run(tmp_path / "base", curve(4.0))
    write_run(tmp_path / "tuned", curve(3.7), optimisation__lr=3e-3)
    write_run(tmp_path / "tst", curve(3.9), bag_size=4, switch=20)
    write_run(tmp_path / "other-seed", curve(3.5), steps=None, seed=7)
    report = make_report([str(tmp_path)])
    (note,) = (note for note in report.notes if "tuned" in note)
    assert "tuned ends BELOW tst, at 3.7000 against 3.9000" in note and "differs in optimisation.lr" in note
    assert not any("base ends" in note for note in report.notes)
    assert any("other-seed" in run.name for run in report.comparisons[0].unpaired)


def test_a_longer_baseline_without_a_shared_seed_is_named(tmp_path):
    write_run(tmp_path / "base", curve(4.0))
    write_run(tmp_path / "tst", curve(3.9), bag_size=4, switch=20)
    write_run(tmp_path / "longer", {200: 3.95}, seed=2)
    (note,) = make_report([str(tmp_path)]).notes
    assert (
        "longer ends above tst, at 3.9500 against 3.9000" in note and "differs in total_steps 100 against 200" in note
    )


def test_runs_without_a_seed_are_not_paired(tmp_path):
    for name, base, arm in (("a", 4.0, 3.9), ("b", 4.2, 4.3)):
        write_run(tmp_path / name / "base", curve(base), seed=None, data__seed=1)
        write_run(tmp_path / name / "tst", curve(arm), bag_size=4, switch=20, seed=None, data__seed=1)
    report = make_report([str(tmp_path)])
    assert report.comparisons == ()
    assert sum("is not counted: no seed was set" in note for note in report.notes) == 4
    (alone,) = make_report([str(tmp_path / "a")]).comparisons
    assert alone.mean_difference == pytest.approx(-0.1)


def test_a_level_mean_says_who_is_where(tmp_path):
    for seed, shift in ((1, 0.1), (2, -0.1)):
        write_run(tmp_path / f"{seed}/base", curve(4.0), seed=seed)
        write_run(tmp_path / f"{seed}/tst", curve(4.0 + shift), bag_size=4, switch=20, seed=seed)
    said = sentences(comparison_of(tmp_path))[0]
    assert "level with base to four decimals on average, ahead in 1 of 2 seeds and behind in 1 of 2 seeds" in said


def test_an_arm_may_be_held_against_another_arm(tmp_path):
    write_run(tmp_path / "tst4", curve(3.9), bag_size=4, switch=20)
    write_run(tmp_path / "tst8", curve(3.8), bag_size=8, switch=30)
    comparison = comparison_of(tmp_path, baseline="tst8")
    (phases,) = comparison.differences
    assert str(phases) == (
        "phases bag 4 for steps 0-19, bag 1 for steps 20-99 against bag 8 for steps 0-29, bag 1 for steps 30-99"
    )
    assert comparison.equal_flops and comparison.equal_loss.baseline_steps is None
    assert "tst8 is no baseline" in comparison.equal_loss.reason


def test_another_share_of_the_held_out_text_is_another_loss(tmp_path):
    write_run(tmp_path / "base", curve(4.0), validation__limit_val_batches=10)
    write_run(tmp_path / "tst", curve(3.9), bag_size=4, switch=20)
    report = make_report([str(tmp_path)])
    assert report.comparisons == ()
    assert any("validation.limit_val_batches 1.0 against 10" in note for note in report.notes)


def test_a_run_that_went_on_elsewhere_tells_of_both_machines(tmp_path):
    elsewhere = {"device": "NVIDIA H200", "precision": "bf16-mixed", "processes": 8, "torch": "2.14.1"}
    write_run(tmp_path / "base", curve(4.0))
    resumes = [{"step": 40, "version": "0.1.0", "machine": elsewhere}]
    write_run(tmp_path / "tst", curve(3.9), bag_size=4, switch=20, resumes=resumes)
    report = make_report([str(tmp_path)])
    assert report.comparisons == ()  # half in another precision is another recipe
    said = "\n".join(report.notes)
    assert "machine.precision 32-true then bf16-mixed against 32-true" in said
    assert "trained on 1 x cpu, 1 then 8 x cpu then NVIDIA H200" in said


def test_the_flops_of_a_run_are_a_finished_ones(tmp_path):
    write_run(tmp_path / "base", curve(4.0))
    write_run(tmp_path / "a-start", curve(3.9), bag_size=4, switch=20, done=40)  # before the finished one
    write_run(tmp_path / "tst", curve(3.9), bag_size=4, switch=20)
    assert f"100 steps, {100 * FLOPS:.3g} FLOPs a run" in sentences(comparison_of(tmp_path))[1]


def test_a_longer_baseline_that_ended_worse_gives_no_speed_up(tmp_path):
    """The shortest baseline that is at the loss answers, whatever longer ones do."""
    write_run(tmp_path / "base", {50: 4.2, 100: 3.9})
    write_run(tmp_path / "longer", {200: 4.02})
    write_run(tmp_path / "longest", {400: 3.7})
    write_run(tmp_path / "tst", {100: 4.0}, bag_size=4, switch=20)
    comparison = comparison_of(tmp_path)
    found = comparison.equal_loss
    assert comparison.mean_difference > 0 and found.baselines == ("base",)
    assert found.baseline_steps == pytest.approx(50 * 2 ** (2 / 3))


def test_a_curve_that_is_straight_in_log_steps_is_read_exactly(tmp_path):
    base = write_run(tmp_path / "base", every(20, 120, lambda n: 8 - 0.5 * math.log(n)))
    arm = write_run(tmp_path / "tst", {120: 8 - 0.5 * math.log(28)}, bag_size=4, switch=20)
    assert comparison_of(base, arm).equal_loss.baseline_steps == pytest.approx(28)


def test_a_baseline_that_does_not_answer_costs_no_seed(tmp_path):
    """The arm is behind: the equally long baseline answers with both seeds, though a longer one has only one."""
    for seed in (1, 2):
        write_run(tmp_path / f"{seed}/base", {50: 5.0, 100: 4.0}, seed=seed)
        write_run(tmp_path / f"{seed}/tst", {100: 4.5}, bag_size=4, switch=20, seed=seed)
    write_run(tmp_path / "1/long", {400: 3.0}, seed=1)
    found = comparison_of(tmp_path).equal_loss
    assert [seeds.seed for seeds in found.seeds] == [1, 2] and found.baselines == ("base",)
    assert found.baseline_steps == pytest.approx(50 * 2**0.5)


def test_equal_loss_uses_the_seeds_that_both_baselines_have(tmp_path):
    """A long baseline of one seed: that seed alone is interpolated, and 4.0 -> 3.0 is half-way at 3.5."""
    for seed in (1, 2):
        write_run(tmp_path / f"{seed}/base", {100: 4.0 + seed - 1}, seed=seed)
        write_run(tmp_path / f"{seed}/tst", {100: 3.5 + seed - 1}, bag_size=4, switch=20, seed=seed)
    write_run(tmp_path / "1/long", {400: 3.0}, seed=1)
    found = comparison_of(tmp_path).equal_loss
    assert found.baseline_steps == pytest.approx(200) and [seeds.seed for seeds in found.seeds] == [1]


def test_a_loss_that_no_baseline_reaches(tmp_path):
    base = write_run(tmp_path / "base", curve(4.0))
    comparison = comparison_of(base, write_run(tmp_path / "tst", curve(3.9), bag_size=4, switch=20))
    found = comparison.equal_loss
    assert (found.baseline_steps, found.speed_up, found.method) == (None, None, None)
    assert "no baseline gets down to 3.9000" in found.reason and "--trainer.max_steps=200" in found.reason


def test_a_loss_that_the_baseline_has_at_its_first_validation(tmp_path):
    base = write_run(tmp_path / "base", curve(4.0))
    found = comparison_of(base, write_run(tmp_path / "tst", curve(5.5), bag_size=4, switch=20)).equal_loss
    assert found.baseline_steps is None and "at its first validation already, at step 20" in found.reason


def test_a_level_arm_is_worth_its_own_steps(tmp_path):
    base = write_run(tmp_path / "base", curve(4.0))
    found = comparison_of(base, write_run(tmp_path / "tst", curve(4.0), bag_size=4, switch=20)).equal_loss
    assert found.speed_up == 1
    said = sentences(comparison_of(base, tmp_path / "tst"))[-1]
    assert "where tst takes 100: 1.00x (read off" in said and "flatters" not in said


def test_an_unfinished_baseline_answers_nothing(tmp_path):
    write_run(tmp_path / "base", curve(4.0), steps=200, done=150)
    write_run(tmp_path / "tst", curve(4.2), bag_size=4, switch=20)
    report = make_report([str(tmp_path)])
    assert report.comparisons == ()
    assert "tst is compared with nothing: no finished baseline (--phases.bag_size=1) is among the runs" in report.notes


# --- what is written ---------------------------------------------------------------------------------------------


@pytest.fixture
def golden(tmp_path, monkeypatch):
    """The stored runs, where the report is to be made as its own command says."""
    shutil.copytree(GOLDEN / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return ["report", "runs", "runs/nowhere", "--output", "report"]


@pytest.mark.parametrize("name", ["report.json", "report.md"])
def test_the_golden_report(name, golden):
    assert main(golden) == 2  # for the damaged, the unstarted and the missing one
    made = Path("report", name).read_text().replace(f'"version": "{__version__}"', '"version": "VERSION"')
    assert made == (GOLDEN / name).read_text()


def test_what_is_known_of_the_golden_runs(golden):
    """The stored report itself holds what follows from how its runs were made, by hand."""
    document = json.loads((GOLDEN / "report.json").read_text(), parse_constant=pytest.fail)
    by_name = {run["name"]: run for run in document["runs"]}
    tst = by_name["seed-1/tst"]
    assert (tst["bag_size"], tst["ratio"], tst["steps"], tst["switch_steps"]) == (4, 0.3, 100, [30])
    assert (tst["latent_tokens"], tst["data_tokens"]) == (100 * TOKENS, 190 * TOKENS)
    assert (tst["flops"], tst["wall_clock"], tst["lr"], tst["seed"]) == (100 * FLOPS, 50, 0.0015, 1)
    assert by_name["diverged"]["val_loss"] is None
    (comparison,) = document["comparisons"]
    assert [pair["difference"] for pair in comparison["pairs"]] == pytest.approx([-0.12, -0.08])
    assert comparison["mean_difference"] == pytest.approx(-0.1)
    # means of 4.05 after 100 steps and 3.85 after 200: half-way, so the geometric mean of the two
    assert comparison["equal_loss"]["speed_up"] == pytest.approx(math.sqrt(2))
    assert len(document["problems"]) == 3


def test_the_same_runs_give_the_same_bytes(golden):
    main(golden)
    first = {path.name: path.read_bytes() for path in Path("report").iterdir()}
    assert set(first) == {"report.md", "report.json", "loss.png"}
    main(golden)
    assert first == {path.name: path.read_bytes() for path in Path("report").iterdir()}


def test_the_page_says_how_it_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(Path("a run/tst"), curve(4.0), bag_size=4, switch=20)
    write_run(Path("a run/base"), curve(4.0))
    main(["report", "a run", "--output", "the page", "--baseline", "base"])
    page = Path("the page/report.md").read_text()
    assert "\n```bash\ntst-lightning report 'a run' --output 'the page' --baseline base\n```\n" in page
    assert "(loss.png)" in page and "arXiv 2605.06546" in page


def test_names_are_text_to_markdown(tmp_path):
    write_run(tmp_path / "a|b_c*d", curve(4.0))
    write_run(tmp_path / "_x_", curve(4.0), optimisation__warmup_steps=1)
    page = markdown(make_report([str(tmp_path)]))
    assert "| a\\|b_c\\*d | 1 |" in page and "| \\_x\\_ | 1 |" in page


def test_killed_while_it_writes_leaves_the_old_report(golden):
    main(golden)
    old = {path.name: path.read_bytes() for path in Path("report").iterdir()}
    write_run(Path("runs/new"), curve(4.0))
    kill = (
        "import os, signal; from tst_lightning.report import plot; from tst_lightning.__main__ import main;"
        f"plot.draw = lambda *_: os.kill(os.getpid(), signal.SIGKILL); main({golden})"
    )
    result = subprocess.run([sys.executable, "-c", kill], capture_output=True, check=False)
    assert result.returncode == -signal.SIGKILL
    left = {path.name: path.read_bytes() for path in Path("report").iterdir()}
    assert old == {name: content for name, content in left.items() if not name.startswith(".unfinished-")}
    main(golden)
    assert {path.name for path in Path("report").iterdir()} == old.keys(), "the next report clears up"


def test_interrupted_while_it_writes_leaves_nothing(golden, monkeypatch):
    from tst_lightning.report import plot

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(plot, "draw", interrupt)
    assert main(golden) == 130
    assert list(Path("report").iterdir()) == []


def test_output_that_cannot_be_written(golden, capsys, monkeypatch):
    Path("file").touch()
    for place in ("file", "file/below"):
        assert main([*golden[:2], "--output", place]) == 2
        output, error = capsys.readouterr()
        assert f"--output {place} cannot be written" in error and "seed-1/tst" in output

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert main([*golden[:2], "--output", "full"]) == 2
    assert "No space left" in capsys.readouterr().err and list(Path("full").iterdir()) == []


def test_nothing_is_written_where_no_run_is(tmp_path):
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "report")]) == 2
    assert not (tmp_path / "report").exists()


def test_json_never_holds_a_nan(tmp_path):
    write_run(tmp_path / "a", {100: 4.0}, optimisation__decay_ratio=math.inf)
    write_run(tmp_path / "b", {100: 4.0}, bag_size=4, switch=20, network__theta=math.nan, network__eps=1e-12)
    write_run(tmp_path / "c", {100: math.nan})
    document = json.loads(as_json(make_report([str(tmp_path)], baseline="a")), parse_constant=pytest.fail)
    assert document["runs"][2]["val_loss"] is None
    differences = {d["name"]: (d["arm"], d["baseline"]) for d in document["comparisons"][0]["differences"]}
    assert differences == {
        "network.theta": (None, None), "network.eps": (1e-12, None), "optimisation.decay_ratio": (None, None)
    }  # fmt: skip


# --- the picture -------------------------------------------------------------------------------------------------


def png_width(path):
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(head[16:20], "big")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "runs",
    [
        {"tst": {}},  # no validation
        {"tst": {100: 4.0}},
        {"$x^$ _y": curve(4.0), "_starts-like-a-private-name": curve(4.1)},
        {"\u6587\u5b57": curve(4.0), "n" * 90: curve(4.1)},
        {f"run-{i}": curve(4.0 + i) for i in range(30)},
        {"diverged": {50: 4.0, 100: math.nan}, "never": {100: math.inf}},
    ],
)
def test_pictures(runs, tmp_path):
    for i, (name, losses) in enumerate(runs.items()):
        write_run(tmp_path / name, losses, steps=100, bag_size=2 + i, switch=10 + i)
    main(["report", str(tmp_path), "--output", str(tmp_path / "report")])
    assert png_width(tmp_path / "report" / "loss.png") == 1350


def test_the_first_losses_do_not_flatten_the_rest(tmp_path):
    from tst_lightning.report.plot import _limits

    losses = {1: 11.0, **every(10, 100, lambda n: 5 - n / 100)}
    tst = {**losses, 20: 8.0}  # in the superposition phase
    paths = [write_run(tmp_path / "base", losses), write_run(tmp_path / "tst", tst, bag_size=4, switch=20)]
    low, high = _limits([Run.read(path, "") for path in paths])
    assert (low, high) == pytest.approx((3.95, 4.85))


def test_a_report_with_a_picture_loads_no_training_stack(golden):
    code = (
        "import sys; from tst_lightning.__main__ import main; main(sys.argv[1:]);"
        "print(*[n for n in ('torch', 'lightning', 'litdata', 'tokenizers') if n in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code, *golden], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "" and Path("report/loss.png").exists()
