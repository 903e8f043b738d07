"""The table of accelerators."""

import pytest

from tst_lightning.hardware import ACCELERATORS, peak_flops


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA B200", "bf16-mixed", 2.25e15),
        ("NVIDIA GB200", "bf16-mixed", 2.5e15),
        ("NVIDIA H200", "bf16-mixed", 989.4e12),
        ("NVIDIA H200", "16-mixed", 989.4e12),
        ("NVIDIA H200", "bf16-true", 989.4e12),
        ("NVIDIA H200 NVL", "bf16-true", 835.5e12),
        ("NVIDIA H100 80GB HBM3", "bf16-mixed", 989.4e12),
        ("NVIDIA H100 PCIe", "bf16-mixed", 756e12),
        ("NVIDIA H100 NVL", "bf16-mixed", 835.5e12),
        ("NVIDIA A100-SXM4-40GB", "bf16-mixed", 312e12),
        ("A100-SXM4-40GB", "bf16-mixed", 312e12),  # older drivers
        ("NVIDIA A100 80GB PCIe", "bf16-mixed", 312e12),
        ("NVIDIA L40S", "bf16-mixed", 362e12),
        ("NVIDIA L4", "bf16-mixed", 121e12),
        ("NVIDIA GeForce RTX 4090", "bf16-mixed", 165.2e12),
        ("Tesla T4", "16-mixed", 65e12),
    ],
)
def test_dense_peaks(name, precision, peak):
    assert peak_flops(name, precision) == pytest.approx(peak, rel=1e-12)


def test_fp32_runs_on_the_tensor_cores_only_where_tf32_is_allowed():
    assert peak_flops("NVIDIA H200", "32-true") == 66.9e12
    assert peak_flops("NVIDIA H200", "32-true", allow_tf32=True) == 494.7e12
    assert peak_flops("NVIDIA H200", "bf16-mixed", allow_tf32=True) == 989.4e12
    assert peak_flops("Tesla T4", "32-true", allow_tf32=True) == 8.1e12  # knows no TF32


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("Tesla T4", "bf16-mixed"),  # no such tensor cores
        ("NVIDIA H200", "64-true"),
        ("NVIDIA H200", "transformer-engine"),
        ("NVIDIA GH200 480GB", "bf16-mixed"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "bf16-mixed"),  # a seventh of one
        ("NVIDIA GeForce RTX 4090 D", "bf16-mixed"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16-mixed"),
        ("NVIDIA H20", "bf16-mixed"),
        ("NVIDIA L40", "bf16-mixed"),
        ("cpu", "32-true"),
        ("", "bf16-mixed"),
    ],
)
def test_what_is_unknown_has_no_peak(name, precision):
    assert peak_flops(name, precision) is None


def test_the_table_makes_sense():
    names = [name for accelerator in ACCELERATORS.values() for name in accelerator.names]
    assert len(names) == len(set(names))
    for key, accelerator in ACCELERATORS.items():
        assert "nvidia.com/" in accelerator.source, key
        rates = [accelerator.fp32, accelerator.tf32, accelerator.fp16]
        assert sorted(rate for rate in rates if rate) == [rate for rate in rates if rate], key
        assert accelerator.bf16 in (None, accelerator.fp16)
        assert 16e9 <= accelerator.memory <= 288e9, key


def test_the_keys_that_a_plan_may_name():
    memory = {"b200": 180, "h200": 141, "h100": 80, "a100": 80}
    assert {key: ACCELERATORS[key].memory // 10**9 for key in memory} == memory
    assert [ACCELERATORS[key].bf16 for key in memory] == [2.25e15, 989.4e12, 989.4e12, 312e12]
