"""The Transformer against slow, obvious references."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from tst_lightning.bags import fold, next_bag_targets
from tst_lightning.config import PRESETS, TransformerConfig
from tst_lightning.errors import UserError
from tst_lightning.losses import multi_hot_cross_entropy
from tst_lightning.model import KeyValueCache, Rotary, Transformer

V = 31


def tiny(**changes):
    shape = {
        "vocab_size": V,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "initializer_range": 0.2,  # far from uniform attention, so that a fault shows
    }
    torch.manual_seed(0)
    return Transformer(TransformerConfig(**{**shape, **changes}))


def random_bags(bag_size, length=7, batch=2):
    return fold(torch.randint(V, (batch, length * bag_size)), bag_size)


# ------------------------------------------------------------------ the slow reference


def rotate_by_complex_numbers(x_LHE, theta):
    """Component i and component i + half are one complex number, turned by position * theta ** (-2i / E)."""
    length, _, size = x_LHE.shape
    half = size // 2
    numbers = torch.complex(x_LHE[..., :half], x_LHE[..., half:])
    frequencies = theta ** (-2 * torch.arange(half, dtype=x_LHE.dtype) / size)
    angles = torch.arange(length, dtype=x_LHE.dtype)[:, None, None] * frequencies
    turned = numbers * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), -1)


def reference_logits(model, bags):
    """One sequence, one head and one position at a time, from the state dict alone."""
    config, weights = model.config, model.state_dict()
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weights[name]

    batch = []
    for bags_LS in bags:
        x = torch.stack(
            [torch.stack([weights["model.embed_tokens.weight"][t] for t in bag]).mean(0) for bag in bags_LS]
        )
        for n in range(config.num_hidden_layers):
            prefix = f"model.layers.{n}."

            def project(y, name, prefix=prefix):
                return y @ weights[f"{prefix}{name}_proj.weight"].T

            y = norm(x, prefix + "input_layernorm.weight")
            q = rotate_by_complex_numbers(project(y, "self_attn.q").view(-1, heads, size), config.rope_theta)
            k = rotate_by_complex_numbers(project(y, "self_attn.k").view(-1, kv_heads, size), config.rope_theta)
            v = project(y, "self_attn.v").view(-1, kv_heads, size)
            mixed = torch.zeros_like(q)
            for head in range(heads):
                shared = head // (heads // kv_heads)
                for i in range(len(x)):
                    scores = k[: i + 1, shared] @ q[i, head] / math.sqrt(size)
                    mixed[i, head] = scores.softmax(0) @ v[: i + 1, shared]
            x = x + project(mixed.flatten(1), "self_attn.o")
            y = norm(x, prefix + "post_attention_layernorm.weight")
            x = x + project(F.silu(project(y, "mlp.gate")) * project(y, "mlp.up"), "mlp.down")
        batch.append(norm(x, "model.norm.weight") @ weights["lm_head.weight"].T)
    return torch.stack(batch)


@pytest.mark.parametrize("bag_size", [1, 3])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 2},
        {"num_key_value_heads": 1, "head_dim": 10},
        {"tie_word_embeddings": True, "rope_theta": 50.0, "rms_norm_eps": 0.1},
    ],
    ids=["full", "grouped", "one-kv-head", "tied"],
)
def test_forward_against_the_reference_in_fp64(changes, bag_size):
    model, bags = tiny(**changes).double(), random_bags(bag_size)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1, 0.3)  # ones would hide a norm in the wrong place
    expected = reference_logits(model, bags)
    torch.testing.assert_close(model(bags), expected, rtol=1e-12, atol=1e-12)
    targets = next_bag_targets(bags)
    torch.testing.assert_close(
        model(bags, targets, "power_law"),
        multi_hot_cross_entropy(expected, targets, "power_law"),
        rtol=1e-12,
        atol=1e-12,
    )


def test_rotary_against_complex_numbers():
    x = torch.randn(3, 50, 2, 8, dtype=torch.float64)
    actual = Rotary(50, 8, 10_000.0, like=x)(x)
    expected = torch.stack([rotate_by_complex_numbers(sequence, 10_000.0) for sequence in x])
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_rotary_turns_in_fp32_and_returns_the_inputs_type():
    x = torch.randn(1, 4096, 1, 8).bfloat16()  # bf16 knows no position above 256 exactly
    rotary = Rotary(4096, 8, 10_000.0, like=x)
    assert rotary.cos_L1E.dtype == torch.float32
    actual = rotary(x)
    assert actual.dtype == torch.bfloat16
    expected = rotate_by_complex_numbers(x[0].double(), 10_000.0)
    torch.testing.assert_close(actual[0].double(), expected, rtol=2**-8, atol=2e-3)


def test_grouped_attention_is_full_attention_with_repeated_heads():
    grouped, full = tiny(num_key_value_heads=2), tiny()
    state = grouped.state_dict()
    for name in state:
        if "k_proj" in name or "v_proj" in name:
            state[name] = state[name].view(2, 6, 24).repeat_interleave(2, 0).reshape(24, 24)
    full.load_state_dict(state)
    bags = random_bags(2)
    torch.testing.assert_close(grouped(bags), full(bags), rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------ shapes, names, initialisation


@pytest.mark.parametrize(("name", "parameters"), [("270m", 267_225_408), ("600m", 600_208_320)])
def test_presets_on_the_meta_device(name, parameters):
    with torch.device("meta"):
        model = Transformer(PRESETS[name])
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert not list(model.buffers())


@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 2, "head_dim": 10}, {"tie_word_embeddings": True}])
def test_the_formula_counts_the_parameters(changes):
    model = tiny(**changes)
    assert sum(parameter.numel() for parameter in model.parameters()) == model.config.num_parameters


def test_names_are_hugging_faces():
    layers = [
        f"model.layers.{n}.{name}.weight"
        for n in range(2)
        for name in (
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
            "input_layernorm",
            "post_attention_layernorm",
        )
    ]
    assert list(tiny().state_dict()) == [
        "model.embed_tokens.weight",
        *layers,
        "model.norm.weight",
        "lm_head.weight",
    ]


def test_a_tied_head_is_the_embedding():
    model = tiny(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert tiny().lm_head.weight is not tiny().model.embed_tokens.weight
    bags = random_bags(2)
    model(bags, next_bag_targets(bags)).backward()
    with torch.device("meta"):
        moved = Transformer(model.config)
    moved.to_empty(device="cpu")
    assert moved.lm_head.weight is moved.model.embed_tokens.weight
    clone = copy.deepcopy(model).double()
    assert clone.lm_head.weight is clone.model.embed_tokens.weight
    assert clone.lm_head.weight is not model.lm_head.weight


@pytest.mark.parametrize("through_meta", [False, True])
def test_initial_weights(through_meta):
    config = TransformerConfig(500, 64, 160, 8, 4, initializer_range=0.05)
    if through_meta:
        with torch.device("meta"):
            model = Transformer(config)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(math.nan)
        for module in model.modules():
            if list(module.parameters(recurse=False)):
                module.reset_parameters()  # type: ignore[operator]
    else:
        model = Transformer(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones(64))
            continue
        std = 0.05 / 4 if "o_proj" in name or "down_proj" in name else 0.05  # 4 = sqrt(2 * 8 layers)
        assert parameter.std().item() == pytest.approx(std, rel=0.05)
        assert abs(parameter.mean().item()) < 0.1 * std


@pytest.mark.parametrize("bag_size", [1, 6, 16])
def test_the_first_loss_is_log_v(bag_size):
    """Near log(V) / s it would be a sum or a mean too many."""
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(1000, 64, 160, 2, 4))
    bags = fold(torch.randint(1000, (4, 32 * bag_size)), bag_size)
    loss = model(bags, next_bag_targets(bags))
    assert loss.item() == pytest.approx(math.log(1000), rel=0.02)


# ------------------------------------------------------------------ what the model may see


@pytest.mark.parametrize("bag_size", [1, 2, 6])
@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 2}], ids=["full", "grouped"])
def test_no_position_sees_a_later_bag(bag_size, changes):
    model, bags = tiny(**changes), random_bags(bag_size)
    before = model(bags)
    for j in range(bags.shape[1]):
        for i in range(bag_size):
            changed = bags.clone()
            changed[:, j, i] = (changed[:, j, i] + 1) % V
            after = model(changed)
            assert torch.equal(after[:, :j], before[:, :j])
            # and every token of the bag counts, there and later
            assert ((after[:, j:] - before[:, j:]).abs().amax(-1) > 0).all()


def test_the_order_in_a_bag_does_not_count_but_the_order_of_bags_does():
    model, bags = tiny().double(), random_bags(3)
    torch.testing.assert_close(model(bags.flip(-1)), model(bags), rtol=1e-12, atol=1e-12)
    swapped = bags[:, [1, 0, *range(2, 7)]]
    assert (model(swapped)[:, -1] - model(bags)[:, -1]).abs().max() > 1e-3


# ------------------------------------------------------------------ what was read before is kept


@pytest.mark.parametrize("bag_size", [1, 3])
@pytest.mark.parametrize(
    "changes",
    [{}, {"num_key_value_heads": 2}, {"num_key_value_heads": 1, "head_dim": 10}, {"tie_word_embeddings": True}],
    ids=["full", "grouped", "one-kv-head", "tied"],
)
@pytest.mark.parametrize("parts", [[11], [1] * 11, [4, 1, 5, 1], [1, 10]], ids=str)
def test_read_in_parts_with_a_cache_the_logits_are_the_same(parts, changes, bag_size):
    model, bags = tiny(**changes).double(), random_bags(bag_size, length=11)
    expected = model(bags)
    cache = KeyValueCache(model.config, 11)
    logits = []
    for part in bags.split(parts, 1):
        before = cache.length
        logits.append(model(part, cache=cache))
        assert cache.length == before + part.shape[1]
    torch.testing.assert_close(torch.cat(logits, 1), expected, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_a_cache_takes_the_type_that_attention_computes_in():
    model, bags = tiny(), random_bags(1)
    with torch.autocast("cpu", torch.bfloat16):
        cache = KeyValueCache(model.config, 7)
        logits = torch.cat([model(part, cache=cache) for part in bags.split(1, 1)], 1)
        expected = model(bags)
    assert logits.dtype == torch.bfloat16
    assert {kept.dtype for layer in cache.layers for kept in layer._kept} == {torch.bfloat16}
    torch.testing.assert_close(logits, expected, rtol=0.05, atol=0.05)


@torch.no_grad()
def test_a_full_cache_refuses_more_and_stays_as_it_was():
    model, bags = tiny(), random_bags(1)
    cache = KeyValueCache(model.config, 6)
    model(bags[:, :5], cache=cache)
    with pytest.raises(UserError, match=r"max_length=6 positions, 5 of them taken, and 2 more do not fit"):
        model(bags[:, 5:], cache=cache)
    torch.testing.assert_close(model(bags[:, 5:6], cache=cache), model(bags)[:, 5:6], rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------ bags of one are plain training


def plain_hidden(model, tokens_BL):
    """The model as anyone would write it without bags."""
    decoder = model.model
    x = F.embedding(tokens_BL, decoder.embed_tokens.weight)
    rotary = Rotary(tokens_BL.shape[1], decoder.head_dim, decoder.rope_theta, like=x)
    for layer in decoder.layers:
        x = layer(x, rotary)
    return decoder.norm(x)


def test_bags_of_one_are_plain_training():
    """Bit for bit with the same head; F.cross_entropy adds up in another order than the fused loss."""
    tokens = torch.randint(V, (4, 20))
    model = tiny()
    bags = fold(tokens, 1)
    targets = next_bag_targets(bags)
    assert torch.equal(model(bags), F.linear(plain_hidden(model, tokens), model.lm_head.weight))

    losses = {
        "ours": model(bags, targets),
        "same head": model.lm_head(plain_hidden(model, tokens), targets),
        "plain": F.cross_entropy(
            F.linear(plain_hidden(model, tokens)[:, :-1], model.lm_head.weight).flatten(0, 1),
            tokens[:, 1:].flatten(),
        ),
    }
    names = [name for name, _ in model.named_parameters()]
    grads = {
        key: dict(zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True))
        for key, loss in losses.items()
    }
    assert torch.equal(losses["ours"], losses["same head"])
    torch.testing.assert_close(losses["ours"], losses["plain"], rtol=2e-6, atol=0)
    for name in names:
        ours = grads["ours"][name]
        assert torch.equal(ours, grads["same head"][name])
        error = (ours - grads["plain"][name]).norm() / grads["plain"][name].norm()
        assert error < 5e-6


@pytest.mark.parametrize("bag_size", [1, 4])
def test_gradients_reach_every_parameter(bag_size):
    model, bags = tiny(num_key_value_heads=2), random_bags(bag_size)
    model(bags, next_bag_targets(bags)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all() and parameter.grad.any(), name


def test_autocast_and_bf16():
    bags = random_bags(4)
    targets = next_bag_targets(bags)
    model = tiny()
    expected = model(bags, targets)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(bags, targets)
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    low = model.bfloat16()(bags, targets)
    for actual in (loss, low):
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, expected, rtol=1e-2, atol=0)


def test_learns_a_periodic_text_in_superposition_and_then_in_recovery():
    torch.manual_seed(0)
    period, length, bag_size = 6, 12, 2
    model = Transformer(TransformerConfig(8, 32, 64, 1, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(bag_size, steps):
        losses = []
        for _ in range(steps):
            starts = torch.randint(period, (8, 1))
            bags = fold((starts + torch.arange(length * bag_size)) % period, bag_size)
            loss = model(bags, next_bag_targets(bags))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    superposition, recovery = train(bag_size, 60), train(1, 60)
    assert superposition[0] == pytest.approx(math.log(8), rel=0.1)
    assert superposition[-1] == pytest.approx(math.log(2), abs=0.02)  # the next bag's two tokens are certain
    assert recovery[-1] < 0.05  # the next token is certain
