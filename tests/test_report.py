"""The table over runs, from stored metrics."""

import pytest

from tst_lightning.__main__ import main
from tst_lightning.report import Run
from tst_lightning.text import count

METRICS = """\
grad_norm,lr,phase/bag_size,step,tokens/data,tokens/latent,train/loss,train/superposition_loss,val/loss,val/perplexity
1.5,0.1,4,1,2048,512,,7.6,,
1.4,0.1,4,2,4096,1024,,7.5,,
,,,2,,,,,7.25,1408.1
1.2,0.1,1,3,4608,1536,7.0,,,
,,,3,,,,,6.5,665.1
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "tst").mkdir()
    (tmp_path / "tst" / "metrics.csv").write_text(METRICS)
    return tmp_path / "tst"


def test_what_a_run_says(run):
    assert Run.read(run) == Run(
        name="tst", steps=3, latent_tokens=1536, data_tokens=4608, bag_size=4, val_loss=6.5, val_step=3
    )


def test_table(run, capsys):
    assert main(["report", str(run)]) == 0
    header, rule, row = capsys.readouterr().out.splitlines()
    assert header.split("  ")[0] == "run" and set(rule) <= {"-", " "}
    assert row.split() == ["tst", "4", "3", "1.54k", "4.61k", "6.5000"]


def test_an_unfinished_run_says_where_its_loss_is_from(run, capsys):
    (run / "metrics.csv").write_text("\n".join(METRICS.splitlines()[:-1]) + "\n")
    main(["report", str(run)])
    assert "7.2500 (at step 2)" in capsys.readouterr().out


def test_every_fault_at_once(run, tmp_path, capsys):
    (tmp_path / "started").mkdir()
    (tmp_path / "started" / "metrics.csv").write_text("step,val/loss\n")
    assert main(["report", str(run), str(tmp_path / "nowhere"), str(tmp_path / "started")]) == 2
    output, error = capsys.readouterr()
    assert "6.5000" in output  # the others are shown all the same
    assert "nowhere holds no run" in error and "has not logged a training step yet" in error


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
        (lambda text: text.replace("tokens/data", "tokens/else"), "is damaged"),
        (lambda text: text.replace("\n1.2,", "\n1.2,9,9,"), "more or fewer values"),
        (lambda text: "\xff" + text, "cannot be read"),
    ],
)
def test_a_damaged_log_is_named(damage, message, run, capsys):
    (run / "metrics.csv").write_bytes(damage(METRICS).encode("latin-1"))
    assert main(["report", str(run)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("cut", range(1, 10))
def test_a_row_that_is_being_written_is_not_read(cut, run):
    (run / "metrics.csv").write_text(METRICS[:-cut])
    assert Run.read(run).val_loss == 7.25
