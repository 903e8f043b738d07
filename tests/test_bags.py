"""Folding, the mean bag embedding and the next-bag targets."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tst_lightning.bags import IGNORE_INDEX, embed_bags, fold, next_bag_targets
from tst_lightning.errors import UserError


def mean_of_lookups(weight, bags):
    """The obvious reference: look every token of the bag up by itself."""
    rows = [weight[bags[..., i].long()] for i in range(bags.shape[-1])]
    return torch.stack(rows).mean(0)


@given(batch=st.integers(0, 3), length=st.integers(0, 5), bag_size=st.integers(1, 5))
def test_fold_puts_consecutive_tokens_into_a_bag(batch, length, bag_size):
    tokens = torch.arange(batch * length * bag_size).view(batch, length * bag_size)
    bags = fold(tokens, bag_size)
    assert bags.shape == (batch, length, bag_size)
    for b in range(batch):
        for j in range(length):
            assert bags[b, j].tolist() == tokens[b, j * bag_size : (j + 1) * bag_size].tolist()


def test_fold_is_a_view_and_takes_any_leading_dimensions():
    tokens = torch.arange(48).view(2, 2, 12)
    bags = fold(tokens, 3)
    assert bags.shape == (2, 2, 4, 3)
    assert bags.data_ptr() == tokens.data_ptr()
    assert fold(tokens[0, 0], 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    strided = tokens[..., ::2]
    assert fold(strided, 3).data_ptr() == strided.data_ptr()


@pytest.mark.parametrize("bag_size", [0, -2])
def test_fold_refuses_a_bag_size_below_one(bag_size):
    with pytest.raises(UserError, match=f"bag_size={bag_size} must be at least 1"):
        fold(torch.arange(6), bag_size)


def test_fold_refuses_a_window_that_does_not_divide():
    with pytest.raises(UserError, match=r"a window of 13 tokens .* bag_size=4: .* such as 12 or 16"):
        fold(torch.arange(13), 4)


@pytest.mark.parametrize("bag_size", [1, 2, 4, 6, 16])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_embed_bags_is_the_mean_of_the_lookups(bag_size, index_dtype):
    torch.manual_seed(0)
    weight = torch.randn(23, 8, dtype=torch.float64, requires_grad=True)
    bags = torch.randint(23, (2, 3, 5, bag_size), dtype=index_dtype)  # more than one leading dimension
    expected, actual = mean_of_lookups(weight, bags), embed_bags(weight, bags)
    assert actual.shape == (2, 3, 5, 8)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    upstream = torch.randn_like(expected)
    torch.testing.assert_close(
        *(torch.autograd.grad((output * upstream).sum(), weight)[0] for output in (actual, expected)),
        rtol=1e-12,
        atol=1e-12,
    )


def test_embed_bags_counts_a_token_as_often_as_it_occurs():
    weight = torch.tensor([[0.0], [3.0]])
    assert embed_bags(weight, torch.tensor([[1, 1, 0]])).item() == 2.0


@pytest.mark.parametrize("bag_size", [2, 6, 16])
def test_embed_bags_in_fp32(bag_size):
    torch.manual_seed(0)
    weight, bags = torch.randn(50, 16), torch.randint(50, (64, bag_size))
    expected = mean_of_lookups(weight.double(), bags).float()
    torch.testing.assert_close(embed_bags(weight, bags), expected, rtol=1e-6, atol=1e-6)


def test_a_bag_of_one_is_a_lookup_bit_for_bit():
    torch.manual_seed(0)
    tokens = torch.randint(20, (4, 300))  # every token many times
    upstream = torch.randn(4, 300, 16)
    start = torch.randn(20, 16)
    bagged, plain = start.clone().requires_grad_(), start.clone().requires_grad_()
    actual, expected = embed_bags(bagged, fold(tokens, 1)), F.embedding(tokens, plain)
    assert torch.equal(actual, expected)
    actual.backward(upstream)
    expected.backward(upstream)
    assert bagged.grad is not None and plain.grad is not None
    assert torch.equal(bagged.grad, plain.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bag_size", [1, 4])
def test_low_precision_gradients_on_a_cpu_accumulate_in_fp32(dtype, bag_size):
    torch.manual_seed(0)
    weight = torch.randn(8, 16).to(dtype).requires_grad_()
    bags = torch.randint(8, (2000, bag_size))  # PyTorch's own backward is off by tens of percent here
    upstream = torch.rand(2000, 16).to(dtype) / 64
    output = embed_bags(weight, bags)
    assert output.dtype == dtype
    expected = mean_of_lookups(weight.detach().double(), bags).to(dtype)
    assert (output.detach().view(torch.int16) - expected.view(torch.int16)).abs().max() <= 1  # one ulp
    output.backward(upstream)
    reference = torch.zeros(8, 16, dtype=torch.float64)
    reference.index_add_(0, bags.flatten(), upstream.double().repeat_interleave(bag_size, 0) / bag_size)
    assert weight.grad is not None and weight.grad.dtype == dtype
    torch.testing.assert_close(weight.grad.double(), reference, rtol=5e-3, atol=0)


def test_a_bag_of_one_in_low_precision_looks_up_the_same_bits():
    weight = torch.randn(8, 16).bfloat16()
    tokens = torch.randint(8, (2, 40))
    assert torch.equal(embed_bags(weight, fold(tokens, 1)), F.embedding(tokens, weight))


@pytest.mark.parametrize("bag_size", [1, 3])
def test_embed_bags_of_nothing(bag_size):
    assert embed_bags(torch.randn(5, 4), torch.zeros(0, 7, bag_size, dtype=torch.long)).shape == (0, 7, 4)


def test_targets_are_the_next_bag():
    bags = fold(torch.arange(12), 3)
    expected = [[3, 4, 5], [6, 7, 8], [9, 10, 11], [IGNORE_INDEX] * 3]
    assert next_bag_targets(bags).tolist() == expected
    assert next_bag_targets(bags.view(1, 1, 4, 3)).tolist() == [[expected]]


def test_with_bags_of_one_the_target_is_the_next_token():
    tokens = torch.randint(100, (2, 9))
    targets = next_bag_targets(fold(tokens, 1)).squeeze(-1)
    assert torch.equal(targets[:, :-1], tokens[:, 1:])
    assert (targets[:, -1] == IGNORE_INDEX).all()


@pytest.mark.parametrize("dtype", [torch.uint16, torch.int32, torch.int64])
def test_targets_are_int64_whatever_the_tokens_are(dtype):
    bags = torch.tensor([[1, 2], [65_535, 40_000]]).to(dtype)
    targets = next_bag_targets(bags)
    assert targets.dtype == torch.int64
    assert targets.tolist() == [[65_535, 40_000], [IGNORE_INDEX, IGNORE_INDEX]]


def test_targets_never_contain_a_token_of_their_own_bag():
    bags = fold(torch.arange(2 * 24).view(2, 24), 4)  # all different
    targets = next_bag_targets(bags)
    for b in range(2):
        for j in range(6):
            assert not set(targets[b, j].tolist()) & set(bags[b, j].tolist())
