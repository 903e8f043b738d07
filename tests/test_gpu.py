"""What only a CUDA device can show: the low-precision kernels, and a run across the switch."""

import csv

import pytest
import torch

from tests.test_training import fit, network
from tst_lightning import (
    Phases,
    Throughput,
    embed_bags,
    generate,
    linear_multi_hot_cross_entropy,
    multi_hot_cross_entropy,
)
from tst_lightning.hardware import peak_flops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("bag_size", [1, 6])
@pytest.mark.parametrize(
    ("dtype", "loss_tolerance", "grad_tolerance"),
    [(torch.float32, 2e-6, 5e-6), (torch.bfloat16, 5e-4, 2e-2), (torch.float16, 5e-4, 5e-3)],
    ids=str,
)
def test_the_fused_loss(dtype, loss_tolerance, grad_tolerance, bag_size, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 64, generator=generator).to(dtype)
    weight = torch.randn(5000, 64, generator=generator).mul(0.1).to(dtype)
    targets = torch.randint(5000, (300, bag_size), generator=generator)

    exact = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    expected = multi_hot_cross_entropy(exact[0] @ exact[1].T, targets)
    expected.backward()
    on_gpu = [tensor.cuda().requires_grad_() for tensor in (hidden, weight)]
    loss = linear_multi_hot_cross_entropy(*on_gpu, targets.cuda(), chunk_size=128)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=loss_tolerance)
    for a, b in zip(on_gpu, exact, strict=True):
        assert a.grad is not None and a.grad.dtype == dtype
        error = (a.grad.double().cpu() - b.grad).norm() / b.grad.norm()
        assert error < grad_tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bag_size", [1, 6])
def test_the_bag_embedding_of_frequent_tokens(bag_size, dtype):
    bags = torch.randint(4, (64, 32, bag_size))
    weight = torch.randn(16, 8).to(dtype)
    upstream = torch.randn(64, 32, 8).to(dtype)
    exact, on_gpu = weight.double().requires_grad_(), weight.cuda().requires_grad_()
    (torch.nn.functional.embedding(bags, exact).mean(2) * upstream.double()).sum().backward()
    (embed_bags(on_gpu, bags.cuda()) * upstream.cuda()).sum().backward()
    error = (on_gpu.grad.double().cpu() - exact.grad).norm() / exact.grad.norm()
    assert error < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-4), ("bf16-mixed", 1e-2)])
def test_a_run_across_the_switch_equals_the_cpus(precision, tolerance, text_corpus, tmp_path):
    losses = {}
    for accelerator, chosen in (("cpu", "32-true"), ("gpu", precision)):
        folder = tmp_path / accelerator
        fit(folder, text_corpus, Phases(bag_size=4, ratio=0.5), steps=20, accelerator=accelerator, precision=chosen)
        with (folder / "metrics.csv").open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["lr"]]
        losses[accelerator] = [float(row["train/superposition_loss"] or row["train/loss"]) for row in rows]
    assert losses["gpu"] == pytest.approx(losses["cpu"], rel=tolerance)


def test_the_speed_of_a_run_and_its_share_of_the_peak(text_corpus, tmp_path):
    options = {"accelerator": "gpu", "precision": "bf16-mixed", "callbacks": [Throughput()]}
    fit(tmp_path, text_corpus, Phases(bag_size=4, ratio=0.5), steps=8, **options)
    peak = peak_flops(torch.cuda.get_device_name(), "bf16-mixed")
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["lr"]]
    for row in rows:
        assert float(row["throughput/step_time"]) > 0
        if peak is None:
            assert "throughput/mfu" not in row
        else:
            assert float(row["throughput/mfu"]) == pytest.approx(float(row["throughput/flops_per_second"]) / peak)
            assert 0 < float(row["throughput/mfu"]) < 1


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_text_with_the_cache_equals_text_without(temperature):
    on_gpu = network().double().cuda()
    with torch.no_grad():
        on_gpu.lm_head.weight.mul_(20)  # far from a tie
    prompt, ids = torch.arange(1, 9), []
    for use_cache in (True, False):
        draws = torch.Generator().manual_seed(0)
        new = generate(on_gpu, prompt, 32, temperature=temperature, top_p=0.9, generator=draws, use_cache=use_cache)
        ids.append(torch.stack([*new]))
    assert ids[0].device.type == "cuda" and torch.equal(*ids)
