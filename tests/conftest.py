"""Shared fixtures: real text, prepared once a session."""

import sysconfig
from pathlib import Path

import pytest
import yaml

from tst_lightning.data.corpus import Corpus

VOCABULARY = 320
STEPS, SWITCH = 24, 12


@pytest.fixture(scope="session")
def text_corpus(tmp_path_factory) -> Corpus:
    """A dozen modules of the standard library, tokenised: about 120k tokens."""
    from tst_lightning.data.prepare import prepare

    stdlib = Path(sysconfig.get_path("stdlib"))
    names = [
        "abc",
        "argparse",
        "ast",
        "bisect",
        "calendar",
        "cmd",
        "codecs",
        "copy",
        "csv",
        "dis",
        "heapq",
        "random",
    ]
    return prepare(
        [stdlib / f"{name}.py" for name in names],
        tmp_path_factory.mktemp("corpus") / "stdlib",
        train_tokenizer=VOCABULARY,
        held_out=0.02,
    )


@pytest.fixture(scope="session")
def recipe(text_corpus, tmp_path_factory):
    """A tiny model with accumulation 2, a switch at step 12, dropped checkpoints and validations in between."""
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    network = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    path.write_text(
        yaml.safe_dump(
            {
                "phases": {"bag_size": 4, "ratio": SWITCH / STEPS},
                "seed_everything": 3,
                "trainer": {
                    "max_steps": STEPS,
                    "accelerator": "cpu",
                    "devices": 1,
                    "accumulate_grad_batches": 2,
                    "gradient_clip_val": 1.0,
                    "val_check_interval": 8,  # micro-batches: every 4 steps
                    "log_every_n_steps": 1,
                    "default_root_dir": "run",
                },
                "model": {
                    "network": {"class_path": "tst_lightning.Transformer", "init_args": {"config": network}},
                    "warmup_steps": 4,
                },
                "data": {
                    "path": str(text_corpus.directory),
                    "latent_length": 32,
                    "global_batch_size": 4,
                    "seed": 5,
                },
                "checkpoint": {"every_n_steps": 5},
            }
        )
    )
    return path
