"""The paper's recipes say what the paper says, and fit together."""

from pathlib import Path

import pytest
import yaml

from tst_lightning import Phases, TransformerConfig

CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.mark.parametrize(
    ("name", "parameters", "rate", "gpus"),
    [("270m", 267_225_408, 2e-3, 8), ("600m", 600_208_320, 1e-3, 8), ("3b", None, 2e-4, 64)],
)
def test_a_recipe_has_the_papers_figures(name, parameters, rate, gpus):
    recipe = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    trainer, model, data = recipe["trainer"], recipe["model"], recipe["data"]
    config = TransformerConfig(**model["network"]["init_args"]["config"])
    assert config.vocab_size == 128_256
    assert parameters in (None, config.num_parameters)
    assert config.num_parameters == pytest.approx({"270m": 0.27e9, "600m": 0.6e9, "3b": 3.3e9}[name], rel=0.02)
    assert float(model["optimizer"]["init_args"]["lr"]) == rate
    assert model["optimizer"]["init_args"]["betas"] == [0.9, 0.95]
    assert (model["warmup_steps"], model["decay_ratio"]) == (2000, 0.1)
    assert trainer["devices"] * trainer["num_nodes"] == gpus
    schedule = Phases(**recipe["phases"]).schedule(trainer["max_steps"])
    assert schedule.boundaries == (6000,)
    latent_tokens = data["latent_length"] * data["global_batch_size"]
    assert latent_tokens == 2 * 1024**2
    assert round(6 * 6000 * latent_tokens / 1e9) == 75
    assert round((6 * 6000 + 14_000) * latent_tokens / 1e9) == 105
    windows, rest = divmod(data["global_batch_size"], gpus * trainer["accumulate_grad_batches"])
    assert windows >= 1 and rest == 0
    assert trainer["val_check_interval"] % trainer["accumulate_grad_batches"] == 0
