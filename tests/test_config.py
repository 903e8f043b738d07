"""The Transformer's shape: validation, counts, presets."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from typing import Any

import pytest

from tst_lightning.config import PRESETS, TransformerConfig
from tst_lightning.errors import UserError

TINY: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def test_defaults_are_derived():
    config = TransformerConfig(**TINY)
    assert (config.num_key_value_heads, config.head_dim) == (4, 6)
    assert config == TransformerConfig(**TINY, num_key_value_heads=4, head_dim=6)


def test_head_dim_may_be_given():
    config = TransformerConfig(**{**TINY, "num_attention_heads": 5}, head_dim=8)
    assert (config.num_key_value_heads, config.head_dim) == (5, 8)


def test_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TransformerConfig(**TINY).vocab_size = 7  # type: ignore[misc]


@pytest.mark.parametrize("field", TINY)
@pytest.mark.parametrize("value", [0, -3, 2.0, True, "8"])
def test_counts_must_be_positive_integers(field, value):
    with pytest.raises(UserError) as caught:
        TransformerConfig(**{**TINY, field: value})
    assert caught.value.faults == (f"{field}={value!r} must be a whole number of at least 1",)


@pytest.mark.parametrize("field", ["num_key_value_heads", "head_dim"])
def test_optional_counts(field):
    with pytest.raises(UserError, match=f"{field}=0 must be a whole number of at least 1, or null"):
        TransformerConfig(**(TINY | {field: 0}))


@pytest.mark.parametrize("field", ["rope_theta", "rms_norm_eps", "initializer_range"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, "x"])
def test_numbers_must_be_positive_and_finite(field, value):
    with pytest.raises(UserError, match=f"{field}={value!r} must be a positive, finite number"):
        TransformerConfig(**TINY, **{field: value})


def test_heads_must_fit():
    with pytest.raises(UserError, match=r"hidden_size=24 is not a multiple of num_attention_heads=5: .* head_dim"):
        TransformerConfig(**{**TINY, "num_attention_heads": 5})
    with pytest.raises(UserError, match="num_attention_heads=4 is not a multiple of num_key_value_heads=3"):
        TransformerConfig(**TINY, num_key_value_heads=3)
    with pytest.raises(UserError, match="head_dim=3 must be even"):
        TransformerConfig(**{**TINY, "num_attention_heads": 8})
    with pytest.raises(UserError, match="head_dim=7 must be even"):
        TransformerConfig(**TINY, head_dim=7)


def test_all_faults_at_once():
    with pytest.raises(UserError) as caught:
        TransformerConfig(
            vocab_size=0,
            hidden_size=25,
            intermediate_size=-1,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=3,
            rope_theta=-1.0,
            tie_word_embeddings="yes",  # type: ignore[arg-type]
        )
    named = [fault.split("=")[0] for fault in caught.value.faults]
    assert named == [
        "vocab_size",
        "intermediate_size",
        "rope_theta",
        "tie_word_embeddings",
        "num_attention_heads",
        "hidden_size",
    ]


def test_round_trip_in_plain_types():
    config = TransformerConfig(**TINY, num_key_value_heads=2, rope_theta=5e5, tie_word_embeddings=True)
    state = config.to_dict()
    assert all(type(value) in (int, float, bool) for value in state.values())
    assert TransformerConfig.from_dict(state) == config


def test_from_dict_refuses_unknown_and_missing_fields():
    state = {**TINY, "n_heads": 4}
    del state["vocab_size"]
    with pytest.raises(UserError) as caught:
        TransformerConfig.from_dict(state)
    assert caught.value.faults[0].startswith("n_heads=4 is no field of the Transformer's shape: remove it")
    assert caught.value.faults[1] == "vocab_size is missing from the Transformer's shape"


@pytest.mark.parametrize(("name", "parameters"), [("270m", 267_225_408), ("600m", 600_208_320)])
def test_presets_have_the_papers_parameter_counts(name, parameters):
    config = TransformerConfig.preset(name)
    assert config is PRESETS[name]
    assert config.num_parameters == parameters
    assert config.num_key_value_heads == config.num_attention_heads
    assert config.head_dim == 64
    assert not config.tie_word_embeddings


def test_flops_by_hand():
    """24 wide, 4 heads of 6, feed-forward 40, two layers, vocabulary 100, windows of 10."""
    block = 4 * 24 * 24 + 3 * 24 * 40
    expected = 6 * (2 * block + 24 * 100) + 12 * 2 * 24 * 10
    assert TransformerConfig(**TINY).flops_per_token(10) == expected == 82_368
    assert TransformerConfig(**TINY, tie_word_embeddings=True).flops_per_token(10) == expected
    grouped = 2 * 2 * 24 * 12  # keys and values half as wide, in two layers; scores and mixing as before
    assert TransformerConfig(**TINY, num_key_value_heads=2).flops_per_token(10) == expected - 6 * grouped


def test_flops_of_the_papers_shape():
    """6 N and a little: 267.2M parameters without the lookup's 73.9M, and attention over 2,048 positions."""
    config = TransformerConfig.preset("270m")
    assert config.flops_per_token(2048) == 6 * (267_225_408 - 73_875_456 - 61 * 576) + 12 * 30 * 576 * 2048


@pytest.mark.parametrize("bag_size", [1, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_key_value_heads": 2},
        {"num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True},
        {"num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 37, "intermediate_size": 8},
    ],
    ids=str,
)
def test_flops_are_what_pytorch_counts(options, bag_size):
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from tst_lightning import Transformer, next_bag_targets

    config = TransformerConfig(**{**TINY, **options})
    bags = torch.randint(config.vocab_size, (2, 12, bag_size))

    # it knows neither CPU attention's own kernel nor the in-place product, which the fused loss adds up with
    def addmm(total_shape, a_shape, b_shape, **_):
        return 2 * a_shape[0] * a_shape[1] * b_shape[1]

    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: addmm})
    with sdpa_kernel(SDPBackend.MATH), counter:
        Transformer(config)(bags, next_bag_targets(bags)).backward()
    assert config.flops_per_token(12) * 2 * 12 == counter.get_total_flops()


def test_an_unknown_preset_names_the_known_ones():
    with pytest.raises(UserError, match="there is no shape '7b': choose one of 270m, 600m"):
        TransformerConfig.preset("7b")


def test_imports_no_torch():
    command = "import sys, tst_lightning.config, tst_lightning.phases; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", command], check=True)
