"""The fused loss against its alternatives: forward and backward through the output layer.

The floor is the output layer's three matrix products alone. ``ordinary`` is what plain next-token training
pays, ``loop`` is the paper's own way (arXiv 2605.06546): one cross-entropy for each token of the bag, over the
same logits.
"""

from __future__ import annotations

import timing
import torch
import torch.nn.functional as F
from torch import Tensor

from tst_lightning import linear_multi_hot_cross_entropy


def main() -> None:
    """Measure and report."""
    options = timing.parser(__doc__.splitlines()[0], repeats=15)
    options.add_argument("--vocab", type=timing.positive, default=32_768, help="rows of the output layer")
    options.add_argument("--positions", type=timing.positive, default=512, help="rows of hidden states")
    options.add_argument("--width", type=timing.positive, default=256, help="of the hidden states")
    options.add_argument("--bag-size", type=timing.positive, default=16, help="targets a position")
    given = timing.begin(options)

    like = {"device": given.device, "dtype": timing.DTYPES[given.dtype]}
    hidden_ND = torch.randn(given.positions, given.width, **like).requires_grad_()
    weight_VD = torch.randn(given.vocab, given.width, **like).div_(given.width**0.5).requires_grad_()
    targets_NS = torch.randint(given.vocab, (given.positions, given.bag_size), device=given.device)
    upstream_NV = torch.randn(given.positions, given.vocab, **like)

    def logits() -> Tensor:
        return F.linear(hidden_ND, weight_VD).float()  # no copy where they are fp32

    def gradients(loss: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss, (hidden_ND, weight_VD))

    def products() -> object:
        with torch.no_grad():
            return hidden_ND @ weight_VD.T, upstream_NV @ weight_VD, upstream_NV.T @ hidden_ND

    def ordinary() -> object:
        return gradients(F.cross_entropy(logits(), targets_NS[:, 0]))

    def fused(bag_size: int) -> object:
        return gradients(linear_multi_hot_cross_entropy(hidden_ND, weight_VD, targets_NS[:, :bag_size]))

    def loop() -> object:
        logits_NV = logits()
        losses = [F.cross_entropy(logits_NV, targets_N) for targets_N in targets_NS.unbind(1)]
        return gradients(torch.stack(losses).mean())

    s = given.bag_size
    cases = {
        "floor": products,
        "ordinary": ordinary,
        "fused s=1": lambda: fused(1),
        f"fused s={s}": lambda: fused(s),
        f"loop s={s}": loop,
    }
    results = timing.measure(cases, given.device, given.repeats)
    pairs = [
        (f"fused s={s}", "ordinary"),
        (f"fused s={s}", f"loop s={s}"),
        ("fused s=1", "ordinary"),
        (f"fused s={s}", "floor"),
        ("ordinary", "floor"),
        (f"loop s={s}", "floor"),
    ]
    timing.report(given, results, {f"{a} / {b}": timing.ratio(results, a, b) for a, b in pairs})


if __name__ == "__main__":
    main()
