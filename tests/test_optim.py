"""Parameter groups and the learning-rate schedule."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tst_lightning.config import TransformerConfig
from tst_lightning.model import Transformer
from tst_lightning.optim import decay_groups, schedule_faults, warmup_stable_decay


def tiny(**changes):
    shape: dict[str, Any] = {
        "vocab_size": 11,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
    }
    return Transformer(TransformerConfig(**shape, num_attention_heads=2, **changes))


def test_norms_and_biases_do_not_decay():
    network = tiny()
    model = nn.ModuleDict({"network": network, "extra": nn.Linear(3, 3)})
    decayed, constant = decay_groups(model.named_parameters())
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert "weight_decay" not in decayed  # the optimiser's own
    assert constant["weight_decay"] == 0.0
    assert {names[parameter] for parameter in constant["params"]} == {
        "network.model.layers.0.input_layernorm.weight",
        "network.model.layers.0.post_attention_layernorm.weight",
        "network.model.layers.1.input_layernorm.weight",
        "network.model.layers.1.post_attention_layernorm.weight",
        "network.model.norm.weight",
        "extra.bias",
    }
    both = decayed["params"] + constant["params"]
    assert len(both) == len(names) and set(both) == set(names)
    assert network.lm_head.weight in set(decayed["params"])


def test_the_name_decides_and_not_the_shape():
    """FSDP1 hands over flat parameters, under the names that they had."""
    flat = {name: nn.Parameter(p.detach().flatten()) for name, p in tiny().named_parameters()}
    decayed, constant = decay_groups(flat.items())
    assert len(constant["params"]) == 5
    assert len(decayed["params"]) == len(flat) - 5
    assert any(p is flat["model.embed_tokens.weight"] for p in decayed["params"])


def test_frozen_shared_and_empty():
    shared, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
    groups = decay_groups([("a.weight", shared), ("b.weight", shared), ("c.weight", frozen)])
    assert groups == [{"params": [shared]}]
    assert decay_groups([("norm.weight", shared)]) == [{"params": [shared], "weight_decay": 0.0}]
    assert decay_groups([("c.weight", frozen)]) == []
    tied = tiny(tie_word_embeddings=True)
    assert sum(len(group["params"]) for group in decay_groups(tied.named_parameters(remove_duplicate=False))) == len(
        list(tied.parameters())
    )


def test_other_names_can_be_exempted():
    model = tiny()
    decayed, constant = decay_groups(model.named_parameters(), no_decay=("norm", "embed_tokens"))
    assert any(p is model.model.embed_tokens.weight for p in constant["params"])
    assert len(decayed["params"]) + len(constant["params"]) == len(list(model.parameters()))


def test_an_optimiser_takes_them():
    optimizer = torch.optim.AdamW(decay_groups(tiny().named_parameters()), weight_decay=0.3)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]


def test_schedule_by_hand():
    factors = [warmup_stable_decay(step, total_steps=20, warmup_steps=4, decay_ratio=0.25) for step in range(22)]
    assert factors == pytest.approx(
        [0.25, 0.5, 0.75, *[1.0] * 12, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0, 0.0],
        abs=1e-15,
    )


def test_schedule_of_the_paper():
    def factor(step):
        return warmup_stable_decay(step, total_steps=20_000, warmup_steps=2_000)

    assert factor(0) == 1 / 2000
    assert factor(1998) == 1999 / 2000
    assert factor(1999) == factor(2000) == factor(17_999) == factor(18_000) == 1
    assert factor(18_001) == 1999 / 2000
    assert factor(19_000) == 0.5
    assert factor(19_999) == 1 / 2000
    assert factor(20_000) == factor(50_000) == 0


def test_final_factor():
    factors = [
        warmup_stable_decay(step, total_steps=10, warmup_steps=0, decay_ratio=0.2, final_factor=0.1)
        for step in (0, 8, 9, 10, 11)
    ]
    assert factors == pytest.approx([1.0, 1.0, 0.55, 0.1, 0.1])


def test_without_warmup_and_decay_it_is_constant():
    factors = [warmup_stable_decay(step, total_steps=5, warmup_steps=0, decay_ratio=0.0) for step in range(6)]
    assert factors == [1.0] * 5 + [0.0]


def test_the_decays_length_is_rounded_on_the_written_number():
    # 0.29 * 100 is 28.999999999999996 in floating point, and 0.25 of 10 is halfway.
    for ratio, total, length in ((0.29, 100, 29), (0.25, 10, 3), (0.05, 10, 1), (0.04, 10, 0)):
        decayed = [
            step
            for step in range(total)
            if warmup_stable_decay(step, total_steps=total, warmup_steps=0, decay_ratio=ratio) < 1
        ]
        assert len(decayed) == max(length - 1, 0)  # the first step of the decay still has the peak rate


@given(
    total=st.integers(1, 300),
    warmup=st.integers(0, 300),
    ratio=st.integers(0, 100).map(lambda percent: percent / 100),
    final=st.sampled_from([0.0, 0.1, 1.0]),
)
def test_schedule_properties(total, warmup, ratio, final):
    decay = math.floor(Fraction(str(ratio)) * total + Fraction(1, 2))
    arguments = {"total_steps": total, "warmup_steps": warmup, "decay_ratio": ratio, "final_factor": final}
    assert bool(schedule_faults(**arguments)) == (warmup + decay > total)
    if warmup + decay > total:
        return
    factors = [warmup_stable_decay(step, **arguments) for step in range(total + 1)]
    assert all(0 < factor <= 1 for factor in factors[:-1])  # every step learns
    assert factors[-1] == final
    assert factors[:warmup] == pytest.approx([(step + 1) / warmup for step in range(warmup)])
    assert factors[warmup : total - decay] == [1.0] * (total - decay - warmup)
    tail = factors[total - decay :]
    assert all(a - b == pytest.approx((1 - final) / decay) for a, b in pairwise(tail))


def test_schedule_faults_names_all_with_the_way_out():
    assert schedule_faults(total_steps=10, warmup_steps=9) == []
    assert schedule_faults(total_steps=0, warmup_steps=-1, decay_ratio=1.5, final_factor=-0.1) == [
        "a run needs at least one optimiser step, not 0: set trainer.max_steps",
        "model.warmup_steps=-1 must not be negative: 0 is no warm-up",
        "model.final_lr_factor=-0.1 must lie in [0, 1]: the share of the peak rate that is left",
        "model.decay_ratio=1.5 must lie in [0, 1]: the share of steps that decay (0.1 in the paper)",
    ]
    assert schedule_faults(total_steps=100, warmup_steps=2000) == [
        "model.warmup_steps=2000 and 10 steps of decay (decay_ratio=0.1) do not fit into 100 steps: use at most 90 "
        "warm-up steps, or raise trainer.max_steps"
    ]
    (fault,) = schedule_faults(total_steps=100, warmup_steps=0, decay_ratio=math.nan)
    assert fault.startswith("model.decay_ratio=nan must lie in [0, 1]")
