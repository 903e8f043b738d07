"""A run that is lengthened: its boundaries stay and its decay moves."""

import csv
import json
import shutil

import pytest
import torch

from tests.conftest import STEPS, SWITCH
from tests.runs import logged, run
from tst_lightning import Phases, PhaseSchedule, UserError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def finished(recipe, tmp_path_factory):
    """The recipe's run with all of its checkpoints."""
    folder = tmp_path_factory.mktemp("finished")
    status, output = run("fit", "--config", recipe, "--checkpoint.keep=-1", folder=folder)
    assert status == 0, output
    return folder / "run"


@pytest.fixture
def copy(finished, tmp_path):
    """A copy of the run that may go on, from a checkpoint by its step."""

    def make(step):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(finished, tmp_path / "run", ignore=shutil.ignore_patterns(".lock"))
        for path in (tmp_path / "run/checkpoints").iterdir():
            if int(path.stem.removeprefix("step-")) > step:
                path.unlink()
        return tmp_path

    return make


def rows(folder):
    with (folder / "run/metrics.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["lr"]]


def newest(folder):
    return torch.load(max((folder / "run/checkpoints").iterdir()), weights_only=True)["tst_lightning"]


# Longer


def test_a_longer_run_keeps_its_boundaries_and_moves_its_decay(copy, recipe, finished):
    folder = copy(20)
    arguments = ["fit", "--config", recipe, "--checkpoint.keep=-1", "--ckpt_path=last"]
    status, output = run(*arguments, "--extend=40", folder=folder)
    assert status == 0, output
    longer = rows(folder)
    assert [int(row["step"]) for row in longer] == list(range(1, 41))
    assert [row["phase/bag_size"] for row in longer] == ["4"] * SWITCH + ["1"] * (40 - SWITCH)
    # the decay takes the last tenth, 4 steps of 40 as it took 2 of 24
    rates = [float(row["lr"]) for row in longer]
    assert rates[4:37] == pytest.approx([1e-3] * 33) and rates[37:] == pytest.approx([7.5e-4, 5e-4, 2.5e-4])
    assert newest(folder)["schedule"] == {"phases": [[4, 0, SWITCH], [1, SWITCH, 40]]}
    record = json.loads((folder / "run/run.json").read_text())
    assert record["schedule"]["phases"][-1] == [1, SWITCH, 40]
    assert [row for row in logged(folder / "run") if int(row["step"]) <= 20] == [
        row for row in logged(finished) if int(row["step"]) <= 20
    ]

    # the same command in a job script finds its work done; the recipe alone goes on with the longer run too
    for again in ([*arguments, "--extend=40"], arguments, ["fit", "--ckpt_path=run"]):
        status, output = run(*again, folder=folder)
        assert status == 0 and "nothing left to train" in output, output


def test_a_longer_run_that_was_killed_goes_on_without_being_told_again(copy, recipe):
    whole = copy(20)
    status, output = run("fit", "--config", recipe, "--ckpt_path=last", "--extend=40", folder=whole)
    assert status == 0, output
    expected = logged(whole / "run")
    folder = copy(20)
    kill = ["--trainer.callbacks+=tests.runs.KillAt", "--trainer.callbacks.step=33"]
    status, output = run("fit", "--config", recipe, "--ckpt_path=last", "--extend=40", *kill, folder=folder)
    assert status < 0, output
    status, output = run("fit", "--ckpt_path=run", folder=folder)
    assert status == 0, output
    assert logged(folder / "run") == expected


def test_a_finished_run_may_be_lengthened(copy, recipe):
    folder = copy(STEPS)
    status, output = run("fit", "--config", recipe, "--ckpt_path=last", "--extend=30", folder=folder)
    assert status == 0, output
    assert [int(row["step"]) for row in rows(folder)] == list(range(1, 31))
    assert float(rows(folder)[STEPS]["lr"]) == pytest.approx(1e-3)  # the rate is back, and decays at the new end


def test_a_run_is_not_shortened(copy, recipe):
    folder = copy(STEPS)
    status, output = run("fit", "--config", recipe, "--ckpt_path=last", "--extend=23", folder=folder)
    assert status == 2 and "--extend 23: the run has 24 steps already" in output
    status, output = run("fit", "--config", recipe, "--ckpt_path=last", "--trainer.max_steps=30", folder=folder)
    assert status == 2 and "--extend STEPS makes the run longer" in output


def test_the_extension_in_a_notebook():
    phases = Phases(bag_size=4, ratio=0.3, extension=50)
    assert phases.schedule(150) == PhaseSchedule.from_ratio(4, 0.3, 100).lengthened(150)
    assert phases.schedule(150).boundaries == (30,)
    for total in (50, 20):
        with pytest.raises(UserError, match=f"extension=50 must be at least 0 and less than the run's {total} steps"):
            phases.schedule(total)
