"""What the README shows is run."""

import re
import shlex
from pathlib import Path

import pytest
import torch

from tests.conftest import VOCABULARY
from tests.runs import run

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = re.findall(r"^tst-lightning (?:.*\\\n)*.*$", README, re.MULTILINE)


def test_the_notebook_block(text_corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/stdlib").symlink_to(text_corpus.directory)
    block = PYTHON[0].replace("2048", str(VOCABULARY)).replace("max_steps=1000", "max_steps=10")
    exec(block, {})
    assert (tmp_path / "runs/notebook/checkpoints/step-000000010.ckpt").exists()
    assert (tmp_path / "runs/notebook/metrics.csv").exists()


def test_the_functions_block():
    embedding, head = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50, bias=False)
    names = {"tokens": torch.randint(50, (2, 24)), "bag_size": 4, "embedding": embedding, "head": head}
    exec(PYTHON[1], {**names, "my_transformer": torch.nn.Identity()})
    assert len(PYTHON) == 2


def test_the_commands(tmp_path):
    """Prepare, fit, report and generate as written, on little text and for a few steps."""
    (tmp_path / "my_texts").mkdir()
    for i in range(4):
        text = "".join(f"line {n} of text {i} says {n * i}\n" for n in range(3000))
        (tmp_path / f"my_texts/{i}.txt").write_text(text)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/quickstart.yaml").write_text((ROOT / "configs/quickstart.yaml").read_text())
    prepare, tst, baseline, report, generate = (shlex.split(command.replace("\\\n", " "))[1:] for command in COMMANDS)
    few = ["--trainer.max_steps=20", "--model.warmup_steps=2"]
    for arguments in (
        [word.replace("8192", "300") for word in prepare],
        *([*(word.replace("8192", "300") for word in fit), *few] for fit in (tst, baseline)),
    ):
        status, output = run(*arguments, folder=tmp_path)
        assert status == 0, (arguments, output)
    status, output = run(*report, folder=tmp_path)
    assert status == 0, output
    assert re.search(r"^tst +4 +20 ", output, re.MULTILINE) and re.search(r"^baseline +1 +20 ", output, re.MULTILINE)
    page = tmp_path / "runs/mine"
    assert {"report.md", "report.json", "loss.png"} <= {path.name for path in page.iterdir()}
    assert "tst against baseline" in (page / "report.md").read_text()
    status, output = run(*generate, folder=tmp_path)
    assert status == 0 and "Once upon" in output, output


@pytest.mark.parametrize("name", re.findall(r"\]\((?!http)([^)]+)\)", README))
def test_links(name):
    assert (ROOT / name).exists()
