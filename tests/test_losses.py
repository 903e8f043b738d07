"""Multi-hot cross-entropy, plain and fused, against a loop of ordinary cross-entropies."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tst_lightning.bags import IGNORE_INDEX
from tst_lightning.errors import UserError
from tst_lightning.losses import bag_weights, linear_multi_hot_cross_entropy, multi_hot_cross_entropy

BAG_SIZES = [1, 2, 4, 6, 16]
WEIGHTINGS = ["uniform", "power_law", "exponential", "first", "explicit"]
V, D = 37, 12


def named_or_explicit(weighting, bag_size):
    return [0.5 + i % 3 for i in range(bag_size)] if weighting == "explicit" else weighting


def raw_weights(weighting, bag_size):
    """The weights as the paper writes them, not normalised."""
    if not isinstance(weighting, str):
        return list(weighting)
    formula = {
        "uniform": lambda i: 1.0,
        "power_law": lambda i: 1 / i,
        "exponential": lambda i: math.exp(-i),
        "first": lambda i: float(i == 1),
    }
    return [formula[weighting](i) for i in range(1, bag_size + 1)]


def loop_of_cross_entropies(logits, targets, weighting="uniform"):
    """The paper's loss: one mean cross-entropy an offset, and their weighted mean."""
    weights = raw_weights(weighting, targets.shape[-1])
    losses = [F.cross_entropy(logits, targets[:, i], ignore_index=IGNORE_INDEX) for i in range(targets.shape[-1])]
    total = sum(weight * loss for weight, loss in zip(weights, losses, strict=True))
    return total / sum(weights)


def make(bag_size, *, padded, rows=29, dtype=torch.float64):
    torch.manual_seed(bag_size)
    hidden = torch.randn(rows, D, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, D, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(V, (rows, bag_size))
    if padded:  # a different number at each offset
        for i in range(bag_size):
            targets[: 1 + i, i] = IGNORE_INDEX
        targets[-1] = IGNORE_INDEX
    return hidden, weight, targets


def loss_and_grads(function, hidden, weight):
    loss = function(hidden, weight)
    return (loss.detach(), *torch.autograd.grad(loss, (hidden, weight)))


def as_fp64(*tensors):
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def relative_error(actual, expected):
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("bag_size", BAG_SIZES)
def test_both_forms_equal_the_loop_in_fp64(bag_size, weighting, padded):
    hidden, weight, targets = make(bag_size, padded=padded)
    weighting = named_or_explicit(weighting, bag_size)
    expected = loss_and_grads(lambda h, w: loop_of_cross_entropies(h @ w.T, targets, weighting), hidden, weight)
    closed = loss_and_grads(lambda h, w: multi_hot_cross_entropy(h @ w.T, targets, weighting), hidden, weight)
    torch.testing.assert_close(closed, expected, rtol=1e-12, atol=1e-12)
    for chunk_size in (None, 1, 7, 29):  # 29 rows: divides and does not divide
        fused = loss_and_grads(
            lambda h, w, chunk=chunk_size: linear_multi_hot_cross_entropy(h, w, targets, weighting, chunk_size=chunk),
            hidden,
            weight,
        )
        torch.testing.assert_close(fused, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("function", [multi_hot_cross_entropy, linear_multi_hot_cross_entropy])
def test_offsets_are_averaged_over_their_own_valid_targets(function):
    """Averaging over a row's valid targets, or over all of them at once, is a different loss."""
    hidden, weight, targets = make(2, padded=False)
    targets[3:, 1] = IGNORE_INDEX
    arguments = (hidden @ weight.T,) if function is multi_hot_cross_entropy else (hidden, weight)
    actual = function(*arguments, targets)
    expected = loop_of_cross_entropies(hidden @ weight.T, targets)
    pooled = F.cross_entropy((hidden @ weight.T).repeat_interleave(2, 0), targets.flatten())
    assert abs(actual - expected) < 1e-12
    assert abs(actual - pooled) > 1e-2


@pytest.mark.parametrize("bag_size", BAG_SIZES)
def test_fp32(bag_size):
    hidden, weight, targets = make(bag_size, padded=True, rows=300, dtype=torch.float32)
    expected = loss_and_grads(lambda h, w: loop_of_cross_entropies(h @ w.T, targets), *as_fp64(hidden, weight))
    for actual in (
        loss_and_grads(lambda h, w: multi_hot_cross_entropy(h @ w.T, targets), hidden, weight),
        loss_and_grads(lambda h, w: linear_multi_hot_cross_entropy(h, w, targets), hidden, weight),
    ):
        assert all(tensor.dtype == torch.float32 for tensor in actual)
        assert relative_error(actual[0], expected[0]) < 2e-6
        assert relative_error(actual[1], expected[1]) < 5e-6
        assert relative_error(actual[2], expected[2]) < 5e-6


@pytest.mark.parametrize("bag_size", BAG_SIZES)
def test_bf16_is_no_worse_than_the_loop(bag_size):
    hidden, weight, targets = make(bag_size, padded=True, rows=300, dtype=torch.bfloat16)
    expected = loss_and_grads(lambda h, w: loop_of_cross_entropies(h @ w.T, targets), *as_fp64(hidden, weight))
    loop = loss_and_grads(lambda h, w: loop_of_cross_entropies((h @ w.T).float(), targets), hidden, weight)
    actual = loss_and_grads(lambda h, w: linear_multi_hot_cross_entropy(h, w, targets), hidden, weight)
    assert [tensor.dtype for tensor in actual] == [torch.float32, torch.bfloat16, torch.bfloat16]
    assert relative_error(actual[0], expected[0]) < 5e-4
    for i in (1, 2):
        assert relative_error(actual[i], expected[i]) < min(2e-2, 1.25 * relative_error(loop[i], expected[i]))


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_low_precision_logits_are_summed_in_fp32(low):
    logits = torch.randn(40, V).to(low)
    targets = torch.randint(V, (40, 4))
    loss = multi_hot_cross_entropy(logits, targets)
    assert loss.dtype == torch.float32
    assert relative_error(loss, loop_of_cross_entropies(logits.double(), targets)) < 2e-6


def test_a_token_that_occurs_twice_counts_twice():
    torch.manual_seed(0)
    hidden, weight = torch.randn(1, D, dtype=torch.float64), torch.randn(V, D, dtype=torch.float64)
    log_probabilities = (hidden @ weight.T).log_softmax(-1)[0]
    expected = -(2 * log_probabilities[5] + log_probabilities[8]) / 3
    targets = torch.tensor([[5, 8, 5]])
    torch.testing.assert_close(multi_hot_cross_entropy(hidden @ weight.T, targets), expected)
    torch.testing.assert_close(linear_multi_hot_cross_entropy(hidden, weight, targets), expected)


def test_leading_dimensions_and_integer_types():
    hidden, weight, targets = make(4, padded=True, rows=30)
    expected = linear_multi_hot_cross_entropy(hidden, weight, targets)
    shaped, shaped_targets = hidden.view(2, 3, 5, D), targets.view(2, 3, 5, 4).int()
    assert torch.equal(linear_multi_hot_cross_entropy(shaped, weight, shaped_targets), expected)
    torch.testing.assert_close(multi_hot_cross_entropy(shaped @ weight.T, shaped_targets), expected)


@pytest.mark.parametrize("function", [multi_hot_cross_entropy, linear_multi_hot_cross_entropy])
def test_another_ignore_index(function):
    hidden, weight, targets = make(3, padded=True)
    arguments = (hidden @ weight.T,) if function is multi_hot_cross_entropy else (hidden, weight)
    targets[targets == 0] = 1
    expected = function(*arguments, targets)
    actual = function(*arguments, targets.masked_fill(targets == IGNORE_INDEX, 0), ignore_index=0)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("rows", [0, 6])
@pytest.mark.parametrize("bag_size", [1, 3])
def test_nothing_to_predict_is_no_loss_and_no_gradient(rows, bag_size):
    hidden, weight = torch.randn(rows, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    targets = torch.full((rows, bag_size), IGNORE_INDEX)
    for function in (
        lambda h, w: multi_hot_cross_entropy(h @ w.T, targets),
        lambda h, w: linear_multi_hot_cross_entropy(h, w, targets),
    ):
        loss, grad_hidden, grad_weight = loss_and_grads(function, hidden, weight)
        assert loss == 0 and loss.shape == ()
        assert grad_hidden.shape == hidden.shape and not grad_hidden.any()
        assert grad_weight.shape == weight.shape and not grad_weight.any()


def test_extreme_logits_stay_finite():
    hidden = torch.tensor([[300.0], [-300.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.5]], requires_grad=True)
    targets = torch.tensor([[1, 1], [0, 2]])
    actual = loss_and_grads(lambda h, w: linear_multi_hot_cross_entropy(h, w, targets), hidden, weight)
    expected = loss_and_grads(lambda h, w: loop_of_cross_entropies(h @ w.T, targets), hidden, weight)
    torch.testing.assert_close(actual, expected)
    assert actual[0] > 100


def test_gradients_are_scaled_by_the_upstream_gradient():
    hidden, weight, targets = make(4, padded=True)
    plain = loss_and_grads(lambda h, w: linear_multi_hot_cross_entropy(h, w, targets), hidden, weight)
    scaled = loss_and_grads(lambda h, w: 3 * linear_multi_hot_cross_entropy(h, w, targets), hidden, weight)
    torch.testing.assert_close(scaled, tuple(3 * tensor for tensor in plain), rtol=1e-14, atol=0)


def test_gradients_of_only_what_needs_them():
    hidden, weight, targets = make(4, padded=True)
    _, grad_hidden, grad_weight = loss_and_grads(
        lambda h, w: linear_multi_hot_cross_entropy(h, w, targets), hidden, weight
    )
    loss = linear_multi_hot_cross_entropy(hidden, weight.detach(), targets)
    assert torch.equal(torch.autograd.grad(loss, hidden)[0], grad_hidden)
    loss = linear_multi_hot_cross_entropy(hidden.detach(), weight, targets)
    assert torch.equal(torch.autograd.grad(loss, weight)[0], grad_weight)
    assert not linear_multi_hot_cross_entropy(hidden.detach(), weight.detach(), targets).requires_grad


class Recorder(TorchDispatchMode):
    """Counts the matrix products and keeps the size of the largest tensor that an operation makes."""

    def __init__(self):
        super().__init__()
        self.largest, self.products = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket in (
            torch.ops.aten.mm,
            torch.ops.aten.addmm,
            torch.ops.aten.addmm_,
        )
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logits_are_never_held(dtype):
    rows, vocabulary, chunk = 128, 1000, 8
    hidden = torch.randn(rows, D, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, D, dtype=dtype, requires_grad=True)
    targets = torch.randint(vocabulary, (rows, 4))
    with Recorder() as fused:
        linear_multi_hot_cross_entropy(hidden, weight, targets, chunk_size=chunk).backward()
    assert fused.largest == vocabulary * D  # the head's gradient; a chunk of logits is smaller
    assert fused.products == 3 * rows / chunk
    with Recorder() as plain:  # the probe does see logits
        multi_hot_cross_entropy(hidden @ weight.T, targets).backward()
    assert plain.largest == rows * vocabulary


def test_no_gradient_work_without_gradients():
    hidden, weight, targets = make(4, padded=True)
    expected = linear_multi_hot_cross_entropy(hidden, weight, targets)
    with torch.no_grad(), Recorder() as recorder:
        loss = linear_multi_hot_cross_entropy(hidden, weight, targets, chunk_size=10)
    assert recorder.products == 3  # the logits of three chunks and nothing else
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-14, atol=0)
    assert not loss.requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(linear_multi_hot_cross_entropy(hidden, weight, targets), loss)


def test_a_second_backward_is_refused():
    hidden, weight, targets = make(2, padded=False)
    loss = linear_multi_hot_cross_entropy(hidden, weight, targets)
    loss.backward(retain_graph=True)
    assert hidden.grad is not None
    before = hidden.grad.clone()
    with pytest.raises(RuntimeError, match=r"one backward pass, and this is the second: compute the loss again"):
        loss.backward()
    assert torch.equal(hidden.grad, before)


def test_double_backward_is_refused():
    hidden, weight, targets = make(2, padded=False)
    loss = linear_multi_hot_cross_entropy(hidden, weight, targets)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(loss, hidden, create_graph=True)
    loss.backward()  # the gradients are still there
    assert hidden.grad is not None


def test_the_plain_form_can_be_differentiated_twice():
    _, _, targets = make(2, padded=True, rows=5)
    logits = torch.randn(5, V, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda z: multi_hot_cross_entropy(z, targets), logits)


@pytest.mark.parametrize("bag_size", [1, 6])
@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16])
def test_autocast(hidden_dtype, bag_size):
    hidden, weight, targets = make(bag_size, padded=True, rows=300, dtype=torch.float32)
    hidden = hidden.detach().to(hidden_dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_multi_hot_cross_entropy(hidden, weight, targets)
    assert loss.dtype == torch.float32
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert [grad.dtype for grad in grads] == [hidden_dtype, torch.float32]
    # The operands are rounded to bf16, and nothing else is: exact on the rounded operands.
    rounded = as_fp64(hidden.bfloat16(), weight.bfloat16())
    expected = loss_and_grads(lambda h, w: loop_of_cross_entropies(h @ w.T, targets), *rounded)
    assert relative_error(loss, expected[0]) < 2e-6
    assert relative_error(grads[0], expected[1]) < (5e-6 if hidden_dtype == torch.float32 else 5e-3)
    assert relative_error(grads[1], expected[2]) < 5e-6


def test_autocast_leaves_fp64_alone():
    hidden, weight, targets = make(2, padded=False)
    expected = linear_multi_hot_cross_entropy(hidden, weight, targets)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear_multi_hot_cross_entropy(hidden, weight, targets), expected)


@pytest.mark.parametrize("bag_size", [1, 2, 5])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_bag_weights(weighting, bag_size):
    weighting = named_or_explicit(weighting, bag_size)
    raw = raw_weights(weighting, bag_size)
    weights = bag_weights(weighting, bag_size)
    assert weights == pytest.approx([weight / sum(raw) for weight in raw], rel=1e-14)
    assert sum(weights) == pytest.approx(1, abs=1e-15)


def test_bag_weights_of_long_bags_do_not_underflow():
    assert bag_weights("exponential", 2000)[0] == pytest.approx(1 - math.exp(-1))


def test_bag_weights_names_every_fault():
    with pytest.raises(UserError, match=r"weighting='linear' is unknown: choose one of uniform, power_law, "):
        bag_weights("linear", 4)  # type: ignore[arg-type]
    with pytest.raises(UserError) as caught:
        bag_weights([1.0, math.nan, -2.0], 4)
    assert len(caught.value.faults) == 2
    assert "weighting has 3 numbers for bag_size=4: give one an offset" in caught.value.faults[0]
    assert "holds [nan, -2.0]: every weight must be finite and not negative" in caught.value.faults[1]
    with pytest.raises(UserError, match="at least one weight must be positive"):
        bag_weights([0.0, 0.0], 2)
    with pytest.raises(UserError, match=r"holds \[inf\]"):
        bag_weights([math.inf, 1.0], 2)
    with pytest.raises(UserError, match="weighting has 0 numbers"):
        bag_weights([], 2)


def test_shapes_and_types_that_do_not_fit():
    hidden, weight, targets = make(2, padded=False)
    with pytest.raises(UserError, match=r"hidden of shape \(29, 12\) and targets of shape \(28, 2\) do not fit"):
        linear_multi_hot_cross_entropy(hidden, weight, targets[:-1])
    with pytest.raises(UserError, match=r"logits of shape \(29, 12\) and targets of shape \(29,\) do not fit"):
        multi_hot_cross_entropy(hidden, targets[:, 0])
    with pytest.raises(UserError) as caught:
        linear_multi_hot_cross_entropy(hidden, weight.T.float(), targets, chunk_size=0)
    assert [fault.split(":")[0] for fault in caught.value.faults] == [
        "chunk_size=0 must be at least 1",
        "weight of shape (12, 37) does not fit hidden of shape (29, 12)",
        "hidden is torch.float64 and weight torch.float32",
    ]
