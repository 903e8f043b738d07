"""A superposition step against a plain one: forward, backward, clipping and AdamW at the same latent length."""

from __future__ import annotations

import timing
import torch
from torch import Tensor, nn

from tst_lightning import Transformer, TransformerConfig, UserError, decay_groups, next_bag_targets


def main() -> None:
    """Measure and report."""
    options = timing.parser(__doc__, repeats=30)
    options.add_argument("--vocab", type=timing.positive, default=8192, help="size of the vocabulary")
    options.add_argument("--width", type=timing.positive, default=256, help="of the residual stream")
    options.add_argument("--inner", type=timing.positive, default=768, help="width of the feed-forward layers")
    options.add_argument("--layers", type=timing.positive, default=4, help="Transformer blocks")
    options.add_argument("--heads", type=timing.positive, default=4, help="of the attention")
    options.add_argument("--length", type=timing.positive, default=256, help="latent length: positions a window")
    options.add_argument("--batch", type=timing.positive, default=4, help="windows a step")
    options.add_argument("--bag-size", type=timing.positive, default=4, help="tokens a bag in the superposition step")
    given = timing.begin(options)
    try:
        config = TransformerConfig(
            vocab_size=given.vocab,
            hidden_size=given.width,
            intermediate_size=given.inner,
            num_hidden_layers=given.layers,
            num_attention_heads=given.heads,
        )
    except UserError as error:
        options.error(f"such a network cannot be built: {error}")

    model = Transformer(config).to(given.device)
    optimizer = torch.optim.AdamW(decay_groups(model.named_parameters()), lr=1e-5)
    # as in text, a few tokens make up most of it (Zipf's law): they meet in the embedding's gradient
    frequencies_V = 1 / torch.arange(1, given.vocab + 1, device=given.device)
    size = (given.batch, given.length, given.bag_size)
    bags_BLS = frequencies_V.multinomial(given.batch * given.length * given.bag_size, replacement=True).view(size)
    mixed = torch.autocast(given.device, torch.bfloat16, enabled=given.dtype == "bfloat16")

    def step(bags_BLS: Tensor) -> None:
        optimizer.zero_grad()
        with mixed:
            loss = model(bags_BLS, next_bag_targets(bags_BLS))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    s = given.bag_size
    plain, superposition = "plain", f"superposition s={s}"
    cases = {plain: lambda: step(bags_BLS[..., :1]), superposition: lambda: step(bags_BLS)}
    results = timing.measure(cases, given.device, given.repeats)
    timing.report(
        given,
        results,
        {f"{superposition} / {plain}": timing.ratio(results, superposition, plain)},
        parameters=config.num_parameters,
        flops=config.flops_per_token(given.length) * given.batch * given.length,
    )


if __name__ == "__main__":
    main()
