"""Text samples in TensorBoard: what they say, and that a run is the same with them and without."""

import html
import math
import os
import re
import subprocess
import sys

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import SingleDeviceStrategy
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugin_util import markdown_to_safe_html
from tokenizers import Tokenizer
from torch.utils.data import DataLoader

import tst_lightning.callbacks.samples
from tests.test_training import data, fit, network, rows, trainer
from tst_lightning import MetricsCSV, Phases, Samples, StepCheckpoint, TensorBoard, TSTModule, UserError, fold
from tst_lightning.callbacks.samples import _code

PHASES = Phases(bag_size=4, ratio=0.5)  # of 8 steps
TAG = "samples/text_summary"


def texts(folder):
    """(step, Markdown) of every sample in the event files, repeats and all."""
    found = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for event in EventFileLoader(str(path)).Load():
            found += [(event.step, v.tensor.string_val[0].decode()) for v in event.summary.value if v.tag == TAG]
    return found


def sampled(folder, corpus, *callbacks, **options):
    return fit(
        folder, corpus, PHASES, logger=[MetricsCSV(folder), TensorBoard(folder)],
        val_check_interval=2, limit_val_batches=2, enable_checkpointing=True,
        callbacks=[*callbacks, StepCheckpoint(every_n_steps=2, keep=-1)], **options,
    )  # fmt: skip


def in_html(page):
    """The code blocks as TensorBoard shows them."""
    return [html.unescape(block) for block in re.findall(r"<code>(.*?)</code>", markdown_to_safe_html(page), re.DOTALL)]


def test_each_validation_of_the_recovery_phase_has_the_texts_of_its_weights(text_corpus, tmp_path):
    sampled(tmp_path, text_corpus, Samples(["def f(", ""], max_new_tokens=20, temperature=0))
    pages = dict(texts(tmp_path))
    assert [*pages] == [2, 4, 6, 8]
    for step in (2, 4):  # after step 4 it was trained on bags only
        assert f"No text at step {step}" in pages[step] and "begins at step 4." in pages[step]
        assert "bag of 4 tokens" in pages[step] and "```" not in pages[step]

    tokenizer = Tokenizer.from_file(str(text_corpus.tokenizer_path))
    for step in (6, 8):
        state = torch.load(tmp_path / f"checkpoints/step-{step:09d}.ckpt", weights_only=True)["state_dict"]
        weights = network()
        weights.load_state_dict({name.removeprefix("network."): tensor for name, tensor in state.items()})
        samples = []
        for prompt in ("def f(", ""):
            ids = [0, *tokenizer.encode(prompt, add_special_tokens=False).ids]
            length = min(len(ids) + 20, 32)  # no longer than a window
            new = []
            while len(ids) + len(new) < length:
                new.append(int(weights(fold(torch.tensor([ids + new]), 1))[0, -1].argmax()))
            new = new[: new.index(0)] if 0 in new else new
            text = tokenizer.decode(new, skip_special_tokens=False).rstrip("�")
            head = f"**Prompt**\n\n{_code(prompt)}" if prompt else "**Prompt:** none, a document begins"
            samples.append(f"{head}\n\n**Model**\n\n{_code(text)}")
        assert pages[step] == "\n\n---\n\n".join(samples)
    assert pages[6] != pages[8]


def test_by_default_documents_and_held_out_windows_begin(text_corpus, tmp_path):
    sampled(tmp_path, text_corpus, Samples())
    page = dict(texts(tmp_path))[8]
    assert page.count("**Model**") == 3 and page.count("**Prompt:** none, a document begins") == 1
    stream, tokens = data(text_corpus).stream("val"), text_corpus.splits["val"].tokens
    tokenizer = Tokenizer.from_file(str(text_corpus.tokenizer_path))
    for start in (0, tokens // 32 // 2 * 32):
        prompt = tokenizer.decode(stream.read(start, 16).tolist(), skip_special_tokens=False)
        assert f"**Prompt**\n\n{_code(prompt)}\n\n**Model**" in page


class Draws(Callback):
    """A run that draws from the global random state at every step."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        with torch.no_grad():
            pl_module.network.lm_head.weight += 1e-3 * torch.randn_like(pl_module.network.lm_head.weight)


def test_a_run_is_the_same_with_samples_and_without(text_corpus, tmp_path):
    modules, states = [], []
    for name, samples in (("with", [Samples()]), ("without", [])):
        module, _ = sampled(tmp_path / name, text_corpus, Draws(), *samples)
        modules.append(module)
        states.append(torch.get_rng_state())
    assert len(texts(tmp_path / "with")) == 4 and not texts(tmp_path / "without")
    assert (tmp_path / "with/metrics.csv").read_bytes() == (tmp_path / "without/metrics.csv").read_bytes()
    assert torch.equal(*states)
    for a, b in zip(*(module.parameters() for module in modules), strict=True):
        assert torch.equal(a, b)
    assert all(module.training for module in modules[0].modules()), "left in evaluation mode"


class Stop(Callback):
    """Ends the run in an error where ``step`` begins, or in the validation after it."""

    def __init__(self, step, in_validation):
        self.step, self.in_validation = step, in_validation

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        assert self.in_validation or trainer.global_step < self.step, "stopped"

    def on_validation_end(self, trainer, pl_module):
        assert not self.in_validation or trainer.global_step < self.step, "stopped"


@pytest.mark.parametrize(("step", "in_validation"), [(3, False), (6, False), (7, False), (6, True), (8, True)])
def test_a_run_that_goes_on_has_each_sample_once(step, in_validation, text_corpus, tmp_path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    sampled(whole, text_corpus, Samples())
    with pytest.raises(AssertionError, match="stopped"):
        sampled(stopped, text_corpus, Samples(), Stop(step, in_validation))
    assert texts(stopped)[-1][0] == (step // 2 * 2)
    sampled(stopped, text_corpus, Samples(), ckpt_path=max((stopped / "checkpoints").iterdir()))
    assert texts(stopped) == texts(whole)


@pytest.mark.parametrize(
    "text",
    [
        "```\nout of the block\n```",
        "a ````` b\n`````\nc",
        "~~~\n# no heading\n~~~",
        "</code></pre><script>alert(1)</script> &amp; <b>",
        "<!-- open\n\n\n<div>\n    indented\n\n- list\n| a | b |\n|---|---|",
        "# heading\n\n* * *\n[link](http://x) **bold** \\` end",
        "",
    ],
)
def test_no_text_gets_out_of_its_block(text):
    page = f"before\n\n{_code(text)}\n\n**after**"
    assert in_html(page) == [text + "\n"]
    assert markdown_to_safe_html(page).endswith("<p><strong>after</strong></p>")


def test_without_tensorboard_or_prompts_nothing_is_generated(text_corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(tst_lightning.callbacks.samples, "generate", None)
    fit(tmp_path / "csv", text_corpus, None, steps=2, callbacks=[Samples()], limit_val_batches=1)
    sampled(tmp_path / "off", text_corpus, Samples([]))
    assert not texts(tmp_path / "off")


def test_a_run_without_recovery_says_so(text_corpus, tmp_path):
    fit(
        tmp_path, text_corpus, Phases(bag_size=4, ratio=1.0), steps=2,
        logger=TensorBoard(tmp_path), limit_val_batches=1, callbacks=[Samples()],
    )  # fmt: skip
    [(step, page)] = texts(tmp_path)
    assert step == 2 and "no recovery phase" in page


def test_weights_that_diverge_in_the_last_step_give_no_text(text_corpus, tmp_path):
    class Diverge(Callback):
        def on_validation_start(self, trainer, pl_module):
            if trainer.global_step == 8:
                torch.nn.init.constant_(pl_module.network.model.norm.weight, math.nan)

    sampled(tmp_path, text_corpus, Samples(), Diverge())
    assert "**No text:**" in texts(tmp_path)[-1][1] and "diverged" in texts(tmp_path)[-1][1]
    assert texts(tmp_path)[-1][0] == 8


def test_fsdp1_is_told_to_have_no_text(text_corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(tst_lightning.callbacks.samples, "FSDPStrategy", SingleDeviceStrategy)  # as if it were the one
    sampled(tmp_path, text_corpus, Samples())
    assert "ModelParallelStrategy (FSDP2) can" in texts(tmp_path)[-1][1] and "**Model**" not in texts(tmp_path)[-1][1]


def test_bf16_mixed(text_corpus, tmp_path):
    sampled(tmp_path, text_corpus, Samples(), precision="bf16-mixed")
    assert texts(tmp_path)[-1][1].count("**Model**") == 3


def test_what_is_refused(text_corpus, tmp_path):
    with pytest.raises(UserError) as error:
        Samples(max_new_tokens=0, temperature=-1, top_p=2, seed=-1)
    assert [fault.split()[:2] for fault in error.value.faults] == [
        ["samples:", "max_new_tokens=0"], ["samples:", "temperature=-1"], ["samples:", "top_p=2"],
        ["samples:", "seed=-1"],
    ]  # fmt: skip

    long = "x y " * 40
    with pytest.raises(UserError, match=r"samples\.prompts: 'x y .* data\.latent_length=32: shorten it"):
        sampled(tmp_path, text_corpus, Samples(["fine", long]))
    writes, silent = trainer(tmp_path, 2, logger=TensorBoard(tmp_path)), trainer(tmp_path, 2)
    assert len(Samples([long, long]).faults(writes, data(text_corpus))) == 2
    assert Samples(["fine"]).faults(writes, data(text_corpus)) == []
    assert Samples([long]).faults(silent, data(text_corpus)) == []

    loader = DataLoader(torch.zeros(8, 32, dtype=torch.long), batch_size=4)
    run = trainer(tmp_path / "loader", 2, logger=TensorBoard(tmp_path / "loader"), callbacks=[Samples()])
    with pytest.raises(UserError, match="train with TSTDataModule, or leave Samples out"):
        run.fit(TSTModule(network()), loader)
    run = trainer(tmp_path / "none", 2, callbacks=[Samples()])  # nothing to write to, nothing to ask for
    run.fit(TSTModule(network()), loader)


TWO_PROCESSES = """
import sys
from pathlib import Path
from tests.test_samples import Samples, sampled
from tst_lightning import Corpus
sampled(Path(sys.argv[2]), Corpus.load(sys.argv[1]), Samples(), strategy="ddp", devices=2)
"""


@pytest.mark.slow
def test_one_of_two_processes_writes(text_corpus, tmp_path):
    (tmp_path / "script.py").write_text(f"if __name__ == '__main__':{TWO_PROCESSES.replace(chr(10), chr(10) + '    ')}")
    result = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), str(text_corpus.directory), str(tmp_path / "run")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert [step for step, _ in texts(tmp_path / "run")] == [2, 4, 6, 8]
    assert texts(tmp_path / "run")[-1][1].count("**Model**") == 3
    assert len(rows(tmp_path / "run")) == 12
