"""A run that goes on with another global batch or leaves text out, and the held-out loss of a mixture."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.test_training import data, fit, network, rows, trainer
from tst_lightning import (
    Batches,
    DataOrder,
    DataSource,
    Phases,
    PhaseSchedule,
    StepCheckpoint,
    TSTDataModule,
    TSTModule,
    UserError,
    prepare,
)

PHASES = Phases(bag_size=4, ratio=0.5)
STEPS, SWITCH = 8, 4


def checkpoints(folder, corpus, **options):
    """The run up to its end, with a checkpoint of every step."""
    saver = StepCheckpoint(every_n_steps=1, keep=-1)
    _, batches = fit(
        folder, corpus, PHASES, callbacks=[saver], enable_checkpointing=True, limit_val_batches=0, **options
    )
    return batches


def at(folder, step):
    return folder / f"checkpoints/step-{step:09d}.ckpt"


def expected(corpus, batches):
    """The tokens of every step by the order and a plain read of the stream."""
    split = corpus.splits["train"]
    order = DataOrder(PhaseSchedule.from_ratio(4, 0.5, STEPS), (split.tokens,), 32, batches, seed=2)
    stream = data(corpus).stream("train")
    steps = []
    for step in range(STEPS):
        bag = order.schedule.at(step).bag_size
        read = np.stack([stream.read(window.start, 32 * bag) for window in order.batch(step)])
        steps.append(torch.from_numpy(read).view((-1, 32, bag) if bag > 1 else (-1, 32)))
    return steps


def same(found, wanted):
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


# Another global batch


@pytest.mark.parametrize("step", [1, 3, SWITCH, 6])
@pytest.mark.parametrize("size", [2, 7])
def test_another_global_batch_goes_on_where_the_data_were_left(step, size, text_corpus, tmp_path, capsys):
    checkpoints(tmp_path / "before", text_corpus)
    module, batches = fit(
        tmp_path / "after", text_corpus, PHASES, data_options={"global_batch_size": size},
        ckpt_path=at(tmp_path / "before", step), limit_val_batches=0,
    )  # fmt: skip
    same(batches, expected(text_corpus, Batches(((0, 4), (step, size))))[step:])
    last = rows(tmp_path / "after")[-1]
    sizes = [4] * step + [size] * (STEPS - step)
    assert int(last["tokens/latent"]) == 32 * sum(sizes)
    assert int(last["tokens/data"]) == 32 * sum(n * (4 if s < SWITCH else 1) for s, n in enumerate(sizes))
    lines = module.trainer.datamodule.describe(module.schedule, vocab_size=None)
    assert f"NOTE           the global batch changes on the way: 4 from step 0 on, {size} from step {step} on" in lines


def test_the_global_batch_may_change_again_and_back(text_corpus, tmp_path):
    checkpoints(tmp_path / "a", text_corpus)
    checkpoints(tmp_path / "b", text_corpus, data_options={"global_batch_size": 3}, ckpt_path=at(tmp_path / "a", 2))
    _, batches = fit(
        tmp_path / "c", text_corpus, PHASES, ckpt_path=at(tmp_path / "b", 5), limit_val_batches=0
    )  # fmt: skip
    same(batches, expected(text_corpus, Batches(((0, 4), (2, 3), (5, 4))))[5:])
    saved = torch.load(at(tmp_path / "b", 5), weights_only=True)["tst_lightning"]
    assert saved["data"]["global_batch_size"] == 4 and saved["data"]["batch_changes"] == [[2, 3]]
    assert saved["windows_read"] == 4 * (2 * 4) + 4 * (2 * 3) + 3


# Text left out


def test_a_skipped_batch_is_never_trained_on_and_the_next_takes_its_place(text_corpus, tmp_path):
    whole = checkpoints(tmp_path / "before", text_corpus)
    _, batches = fit(
        tmp_path / "after", text_corpus, PHASES, data_options={"skip_steps": [2, 6, 6]},
        ckpt_path=at(tmp_path / "before", 2), limit_val_batches=0,
    )  # fmt: skip
    same(batches, expected(text_corpus, Batches.constant(4, [2, 6, 6]))[2:])
    same(batches[:1], whole[3:4])  # step 2 trains on what step 3 had
    row = rows(tmp_path / "after")[-1]
    assert int(row["tokens/data"]) == 32 * 4 * (4 * SWITCH + 4)  # what was trained on, not what was thrown away


def test_what_was_skipped_stays_so_without_being_told_again(text_corpus, tmp_path):
    options = {"data_options": {"skip_steps": [1]}}
    whole = checkpoints(tmp_path / "whole", text_corpus, **options)
    for given in ({}, options):
        _, batches = fit(
            tmp_path / f"after-{len(given)}", text_corpus, PHASES, ckpt_path=at(tmp_path / "whole", 3),
            limit_val_batches=0, **given,
        )  # fmt: skip
        same(batches, whole[3:])


def test_what_was_trained_on_cannot_be_skipped(text_corpus, tmp_path):
    checkpoints(tmp_path / "before", text_corpus)
    with pytest.raises(UserError, match=r"skip_steps=2: the checkpoint is at step 3 and has trained on that batch"):
        fit(
            tmp_path / "after", text_corpus, PHASES, data_options={"skip_steps": [2]},
            ckpt_path=at(tmp_path / "before", 3),
        )  # fmt: skip
    with pytest.raises(UserError, match=r"skip_steps=8 must lie in \[0, 7\]"):
        fit(tmp_path / "other", text_corpus, PHASES, data_options={"skip_steps": [8, 1]})


# Mixtures


@pytest.fixture(scope="module")
def corpora(text_corpus, tmp_path_factory):
    """Two corpora of one tokenizer: the modules of the standard library, and one long document in capitals."""
    text = tmp_path_factory.mktemp("text") / "capitals.txt"
    text.write_text(Path(random.__file__).read_text().upper())
    other = prepare(
        text, tmp_path_factory.mktemp("other") / "capitals", tokenizer=text_corpus.tokenizer_path, held_out=0.1,
        progress=False,
    )  # fmt: skip
    return text_corpus, other


def mixture(corpora, **options):
    sources = [DataSource(str(corpora[0].directory), 3.0), DataSource(str(corpora[1].directory), 1.0, "capitals")]
    return TSTDataModule(sources=sources, **{"latent_length": 32, "global_batch_size": 4, "seed": 2, **options})


def held_out_loss(module, corpus):
    """The plain mean over every token that is predicted in the whole windows of the held-out text."""
    tokens = corpus.splits["val"].tokens
    stream = TSTDataModule(str(corpus.directory), latent_length=32, global_batch_size=4).stream("val")
    windows = torch.from_numpy(stream.read(0, tokens // 32 * 32).astype(np.int64)).view(-1, 32)
    with torch.no_grad():
        logits = module.network.double()(windows[..., None])
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), windows[:, 1:].flatten()).item()


def test_held_out_loss_of_each_source_and_by_weight_over_all(corpora, tmp_path):
    module = TSTModule(network(), PHASES)
    run = trainer(tmp_path, STEPS)
    run.fit(module, mixture(corpora))
    row = rows(tmp_path)[-1]
    each = [held_out_loss(module, corpus) for corpus in corpora]
    assert float(row["val/loss/stdlib"]) == pytest.approx(each[0], rel=1e-6)
    assert float(row["val/loss/capitals"]) == pytest.approx(each[1], rel=1e-6)
    assert float(row["val/loss"]) == pytest.approx(0.75 * each[0] + 0.25 * each[1], rel=1e-6)
    validated = run.validate(module.float(), mixture(corpora), verbose=False)
    assert validated[0]["val/loss/capitals"] == pytest.approx(each[1], rel=1e-5)


def test_a_mixture_goes_on_exactly_from_every_step_with_another_accumulation(corpora, tmp_path):
    def go(folder, ckpt_path=None, **options):
        saver = StepCheckpoint(every_n_steps=1, keep=-1)
        module = TSTModule(network(), PHASES)
        run = trainer(folder, STEPS, callbacks=[saver], enable_checkpointing=True, limit_val_batches=0, **options)
        run.fit(module, mixture(corpora), ckpt_path=ckpt_path)
        return [{k: v for k, v in row.items() if v} for row in rows(folder)]

    whole = go(tmp_path / "whole")
    for step in (3, SWITCH, 5):
        after = go(tmp_path / f"after-{step}", at(tmp_path / "whole", step))
        assert after == whole[step:]
    other = go(tmp_path / "four", at(tmp_path / "whole", 3), accumulate_grad_batches=4)
    for a, b in zip(other, whole[3:], strict=True):
        assert {k: float(v) for k, v in a.items()} == pytest.approx({k: float(v) for k, v in b.items()}, rel=2e-5)


def test_sources_of_different_tokenizers_are_refused(corpora, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("one two three four five six seven\n" * 2000)
    other = prepare(text, tmp_path / "other", train_tokenizer=260, held_out=0.1, progress=False)
    module = TSTModule(network(), PHASES)
    with pytest.raises(UserError, match=r"were tokenised differently .*prepare both with the same --tokenizer"):
        trainer(tmp_path / "run", STEPS).fit(module, mixture((corpora[0], other)))
