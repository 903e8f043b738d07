"""What accelerators can do at most, by the data sheets. Imports no PyTorch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Accelerator:
    """One accelerator: the most it could do, never reached in practice.

    Rates are *dense* FLOP/s; NVIDIA's data sheets often print twice that, "with sparsity".

    Attributes:
        names: what ``torch.cuda.get_device_name`` calls it, "NVIDIA" in front left out.
        memory_gb: memory in GB, by the data sheet.
        bf16: peak with bf16 operands, ``None`` where the tensor cores know no bf16.
        fp16: peak with fp16 operands, accumulating in fp32.
        tf32: peak of fp32 products rounded to TF32, ``None`` where there is no TF32.
        fp32: peak of true fp32, off the tensor cores.
        source: where the figures are from.
    """

    names: tuple[str, ...]
    memory_gb: int
    bf16: float | None
    fp16: float
    tf32: float | None
    fp32: float
    source: str

    @property
    def memory(self) -> int:
        """Bytes; PyTorch shows from 1% less to 7% more, as some data sheets' GB are 2**30 bytes and some 10**9."""
        return self.memory_gb * 10**9


_NVIDIA = "https://www.nvidia.com/en-us/data-center"
_HGX = f"{_NVIDIA}/hgx/"  # eight of them, with sparsity
_GB300 = f"{_NVIDIA}/gb300-nvl72/"  # 72 of them, with sparsity, clocked higher than the HGX board's
_GB200 = f"{_NVIDIA}/gb200-nvl72/"  # the same
_H200 = f"{_NVIDIA}/h200/"  # with sparsity
_H100 = f"{_NVIDIA}/h100/"  # with sparsity
_GH100 = "https://resources.nvidia.com/en-us-tensor-core"  # the architecture's white paper
_A100 = f"{_NVIDIA}/a100/"
_L40S = f"{_NVIDIA}/l40s/"
_L4 = f"{_NVIDIA}/l4/"  # with sparsity
_RTX50 = "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
_ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
_V100 = "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
_T4 = f"{_NVIDIA}/tesla-t4/"

# Left out, because sources disagree: A10G (70 or 125 TFLOP/s). A device that is not here has no MFU, rather than a
# guessed one; Throughput(peak_flops=...) takes the figure.
# fmt: off
ACCELERATORS: dict[str, Accelerator] = {
    #                        names                                   GB  bf16      fp16      tf32      fp32      source
    "b300":      Accelerator(("B300 SXM6 AC",),                    270, 2250e12,  2250e12,  1125e12,  75e12,    _HGX),
    "b200":      Accelerator(("B200",),                            180, 2250e12,  2250e12,  1125e12,  75e12,    _HGX),
    "gb300":     Accelerator(("GB300",),                           277, 2500e12,  2500e12,  1250e12,  80e12,    _GB300),
    "gb200":     Accelerator(("GB200",),                           186, 2500e12,  2500e12,  1250e12,  80e12,    _GB200),
    "h200":      Accelerator(("H200",),                            141, 989.4e12, 989.4e12, 494.7e12, 66.9e12,  _H200),
    "h200-nvl":  Accelerator(("H200 NVL",),                        141, 835.5e12, 835.5e12, 417.5e12, 60e12,    _H200),
    "h100":      Accelerator(("H100 80GB HBM3",),                   80, 989.4e12, 989.4e12, 494.7e12, 66.9e12,  _H100),
    "h100-nvl":  Accelerator(("H100 NVL",),                         94, 835.5e12, 835.5e12, 417.5e12, 60e12,    _H100),
    "h100-pcie": Accelerator(("H100 PCIe",),                        80, 756e12,   756e12,   378e12,   51.2e12,  _GH100),
    "a100":      Accelerator(("A100-SXM4-80GB", "A100 80GB PCIe"),  80, 312e12,   312e12,   156e12,   19.5e12,  _A100),
    "a100-40gb": Accelerator(("A100-SXM4-40GB", "A100-PCIE-40GB"),  40, 312e12,   312e12,   156e12,   19.5e12,  _A100),
    "l40s":      Accelerator(("L40S",),                             48, 362e12,   362e12,   183e12,   91.6e12,  _L40S),
    "l4":        Accelerator(("L4",),                               24, 121e12,   121e12,   60e12,    30.3e12,  _L4),
    "rtx-5090":  Accelerator(("GeForce RTX 5090",),                 32, 209.5e12, 209.5e12, 104.8e12, 104.8e12, _RTX50),
    "rtx-4090":  Accelerator(("GeForce RTX 4090",),                 24, 165.2e12, 165.2e12, 82.6e12,  82.6e12,  _ADA),
    "v100":      Accelerator(("Tesla V100-SXM2-32GB",),             32, None,     125e12,   None,     15.7e12,  _V100),
    "v100-16gb": Accelerator(("Tesla V100-SXM2-16GB",),             16, None,     125e12,   None,     15.7e12,  _V100),
    "t4":        Accelerator(("Tesla T4",),                         16, None,     65e12,    None,     8.1e12,   _T4),
}
# fmt: on
_BY_NAME = {name: accelerator for accelerator in ACCELERATORS.values() for name in accelerator.names}


def peak_flops(device_name: str, precision: str, allow_tf32: bool = False) -> float | None:
    """The dense peak of a device in the products of a training run, in FLOP/s.

    Args:
        device_name: as ``torch.cuda.get_device_name`` says it. It must be known to the letter: a slice of a
            device, or a sibling with fewer cores, has another peak.
        precision: as Lightning's ``trainer.precision`` says it, such as ``bf16-mixed`` or ``32-true``.
        allow_tf32: whether fp32 products may be rounded to TF32 (PyTorch's default is not).

    Returns:
        FLOP/s, or ``None`` where the device or its rate at that precision is unknown.
    """
    accelerator = _BY_NAME.get(device_name.removeprefix("NVIDIA "))
    if accelerator is None:
        return None
    if precision == "32-true":
        return accelerator.tf32 if allow_tf32 and accelerator.tf32 is not None else accelerator.fp32
    return {
        "bf16-mixed": accelerator.bf16,
        "bf16-true": accelerator.bf16,
        "16-mixed": accelerator.fp16,
        "16-true": accelerator.fp16,
    }.get(precision)
