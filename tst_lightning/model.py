"""A Llama-style dense Transformer over bags of tokens. Pure PyTorch.

Parameter names are Hugging Face's (``LlamaForCausalLM``), so that export is a rename. Llama: Touvron et al.,
arXiv 2302.13971; RMSNorm: Zhang and Sennrich, arXiv 1910.07467; rotary position embedding: Su et al., arXiv
2104.09864; SwiGLU: Shazeer, arXiv 2002.05202; grouped-query attention: Ainslie et al., arXiv 2305.13245.

There are no buffers, and every module that owns parameters has a ``reset_parameters``: the model can be built
on the meta device and initialised where it ends up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tst_lightning.bags import embed_bags
from tst_lightning.config import TransformerConfig
from tst_lightning.errors import UserError
from tst_lightning.losses import Weighting, linear_multi_hot_cross_entropy


class BagEmbedding(nn.Embedding):
    """Token embedding whose input is bags: the mean of each bag's, see :func:`~tst_lightning.embed_bags`."""

    def __init__(self, vocab_size: int, hidden_size: int, std: float) -> None:
        self.std = std  # before the parent's constructor, which initialises
        super().__init__(vocab_size, hidden_size)

    def reset_parameters(self) -> None:
        """Draw the weight from a normal distribution."""
        nn.init.normal_(self.weight, std=self.std)

    def forward(self, bags_BLS: Tensor) -> Tensor:
        """(B, L, S) token ids to (B, L, D)."""
        return embed_bags(self.weight, bags_BLS)


class Linear(nn.Linear):
    """Linear layer without bias that knows the standard deviation of its initial weight."""

    def __init__(self, in_features: int, out_features: int, std: float) -> None:
        self.std = std  # before the parent's constructor, which initialises
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Draw the weight from a normal distribution."""
        nn.init.normal_(self.weight, std=self.std)


class LanguageModelHead(Linear):
    """The output layer. The fused loss lives here, where FSDP has gathered the weight."""

    def forward(
        self, hidden_BLD: Tensor, targets_BLS: Tensor | None = None, weighting: Weighting = "uniform"
    ) -> Tensor:
        """(B, L, D) to logits (B, L, V), or with targets (B, L, S) to the scalar multi-hot cross-entropy."""
        if targets_BLS is None:
            return F.linear(hidden_BLD, self.weight)
        return linear_multi_hot_cross_entropy(hidden_BLD, self.weight, targets_BLS, weighting)


class Rotary:
    """The rotary position embedding of one forward pass, in Hugging Face's convention of turning halves.

    A plain object rather than two tensors or a buffer: FSDP's mixed precision would round those to bf16.
    """

    def __init__(self, length: int, head_dim: int, theta: float, like: Tensor, start: int = 0) -> None:
        dtype = torch.promote_types(like.dtype, torch.float32)
        exponents_E = torch.arange(0, head_dim, 2, device=like.device, dtype=dtype) / head_dim
        positions_L1 = torch.arange(start, start + length, device=like.device, dtype=dtype).unsqueeze(-1)
        angles_L1E = (positions_L1 / theta**exponents_E).unsqueeze(1)
        cos_L1E, sin_L1E = angles_L1E.cos(), angles_L1E.sin()
        self.cos_L1E = torch.cat((cos_L1E, cos_L1E), -1)
        self.signed_sin_L1E = torch.cat((-sin_L1E, sin_L1E), -1)

    def __call__(self, x_BLHE: Tensor) -> Tensor:
        """Turn (B, L, H, head_dim) by position; computed in fp32, returned in its own type."""
        swapped_BLHE = x_BLHE.roll(x_BLHE.shape[-1] // 2, -1)
        return torch.addcmul(x_BLHE * self.cos_L1E, swapped_BLHE, self.signed_sin_L1E).to(x_BLHE.dtype)


class LayerCache:
    """One layer's share of a :class:`KeyValueCache`."""

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.length = 0
        self._kept: tuple[Tensor, Tensor] | None = None

    def extend(self, keys_BHLE: Tensor, values_BHLE: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keep L new positions behind those that were there.

        Returns:
            All keys and all values, (B, H, T, E), and which of the T positions each new one sees: (L, T) bool, or
            None where it is all of them.

        Raises:
            UserError: if they do not fit.
        """
        start, stop = self.length, self.length + keys_BHLE.shape[2]
        if stop > self.max_length:
            raise UserError(
                f"the cache holds max_length={self.max_length} positions, {start} of them taken, and {stop - start} "
                "more do not fit: make it larger"
            )
        room = 0 if self._kept is None else self._kept[0].shape[2]
        if stop > room:  # twice as much each time; not before, because autocast and FSDP decide on the type
            shape = (*keys_BHLE.shape[:2], min(self.max_length, max(stop, 2 * room)), keys_BHLE.shape[3])
            old = self._kept
            self._kept = (keys_BHLE.new_empty(shape), values_BHLE.new_empty(shape))
            for kept_BHTE, old_BHTE in zip(self._kept, old or (), strict=False):
                kept_BHTE[:, :, :start] = old_BHTE[:, :, :start]
        assert self._kept is not None
        for kept_BHTE, new_BHLE in zip(self._kept, (keys_BHLE, values_BHLE), strict=True):
            kept_BHTE[:, :, start:stop] = new_BHLE
        self.length = stop
        keys_BHTE, values_BHTE = (kept_BHTE[:, :, :stop] for kept_BHTE in self._kept)
        seen_LT = None
        if stop - start > 1:
            seen_LT = torch.ones(stop - start, stop, dtype=torch.bool, device=keys_BHLE.device).tril(start)
        return keys_BHTE, values_BHTE, seen_LT


class KeyValueCache:
    """Keys and values of the positions that a :class:`Transformer` has read, so that it does not read them again.

    Every call of the network with the same cache adds its positions behind those before. For inference, under
    ``torch.no_grad``. It grows with what was read, to ``2 * layers * B * max_length * kv_heads * head_dim`` numbers
    in the type that the network computes in.

    Args:
        config: the network's shape.
        max_length: positions that there is room for.
    """

    def __init__(self, config: TransformerConfig, max_length: int) -> None:
        self.layers = [LayerCache(max_length) for _ in range(config.num_hidden_layers)]

    @property
    def length(self) -> int:
        """Positions read so far."""
        return self.layers[0].length


class Attention(nn.Module):
    """Causal self-attention with rotary positions, multi-head or grouped-query."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        assert config.head_dim and config.num_key_value_heads
        self.head_dim = config.head_dim
        self.grouped = config.num_key_value_heads != config.num_attention_heads
        std, width = config.initializer_range, config.hidden_size
        queries, keys = (heads * self.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = Linear(width, queries, std)
        self.k_proj = Linear(width, keys, std)
        self.v_proj = Linear(width, keys, std)
        self.o_proj = Linear(queries, width, _residual_std(config))

    def forward(self, x_BLD: Tensor, rotary: Rotary, cache: LayerCache | None = None) -> Tensor:
        """(B, L, D) to (B, L, D); with a cache the L positions also see those in it, and join them."""
        heads = (-1, self.head_dim)
        q_BHLE = rotary(self.q_proj(x_BLD).unflatten(-1, heads)).transpose(1, 2)
        k_BHLE = rotary(self.k_proj(x_BLD).unflatten(-1, heads)).transpose(1, 2)
        v_BHLE = self.v_proj(x_BLD).unflatten(-1, heads).transpose(1, 2)
        seen_LT = None
        if cache is not None:
            k_BHLE, v_BHLE, seen_LT = cache.extend(k_BHLE, v_BHLE)
        mixed_BHLE = F.scaled_dot_product_attention(
            q_BHLE, k_BHLE, v_BHLE, attn_mask=seen_LT, is_causal=cache is None, enable_gqa=self.grouped
        )
        output_BLD: Tensor = self.o_proj(mixed_BHLE.transpose(1, 2).flatten(-2))
        return output_BLD


class MLP(nn.Module):
    """SwiGLU feed-forward layer."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        std, width, inner = config.initializer_range, config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(width, inner, std)
        self.up_proj = Linear(width, inner, std)
        self.down_proj = Linear(inner, width, _residual_std(config))

    def forward(self, x_BLD: Tensor) -> Tensor:
        """(B, L, D) to (B, L, D)."""
        output_BLD: Tensor = self.down_proj(F.silu(self.gate_proj(x_BLD)) * self.up_proj(x_BLD))
        return output_BLD


class DecoderLayer(nn.Module):
    """A pre-norm Transformer block."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x_BLD: Tensor, rotary: Rotary, cache: LayerCache | None = None) -> Tensor:
        """(B, L, D) to (B, L, D)."""
        x_BLD = x_BLD + self.self_attn(self.input_layernorm(x_BLD), rotary, cache)
        output_BLD: Tensor = x_BLD + self.mlp(self.post_attention_layernorm(x_BLD))
        return output_BLD


class Decoder(nn.Module):
    """Everything but the output layer: bags to normalised hidden states."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        assert config.head_dim
        self.head_dim = config.head_dim
        self.rope_theta = config.rope_theta
        self.embed_tokens = BagEmbedding(config.vocab_size, config.hidden_size, config.initializer_range)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, bags_BLS: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """(B, L, S) token ids to (B, L, D); with a cache they follow what is in it."""
        x_BLD: Tensor = self.embed_tokens(bags_BLS)
        start = 0 if cache is None else cache.length
        rotary = Rotary(x_BLD.shape[1], self.head_dim, self.rope_theta, like=x_BLD, start=start)
        caches = [None] * len(self.layers) if cache is None else cache.layers
        for layer, layer_cache in zip(self.layers, caches, strict=True):
            x_BLD = layer(x_BLD, rotary, layer_cache)
        hidden_BLD: Tensor = self.norm(x_BLD)
        return hidden_BLD


class Transformer(nn.Module):
    """The language model: bags of tokens in, logits or the loss out.

    Initial weights are normal with standard deviation ``initializer_range``; those that write to the residual
    stream (``o_proj``, ``down_proj``) are smaller by ``1 / sqrt(2 * num_hidden_layers)`` (GPT-2, Radford et
    al. 2019, section 2.3); norms are 1.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = LanguageModelHead(config.hidden_size, config.vocab_size, config.initializer_range)
        self._tie()

    def forward(
        self,
        bags_BLS: Tensor,
        targets_BLS: Tensor | None = None,
        weighting: Weighting = "uniform",
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Logits of every position, or with targets their multi-hot cross-entropy.

        Args:
            bags_BLS: (B, L, S) token ids, int32 or int64; S = 1 is plain training.
            targets_BLS: (B, L, S), see :func:`~tst_lightning.next_bag_targets`; S need not be the input's.
            weighting: weights of the offsets in the target bag, see :func:`~tst_lightning.bag_weights`.
            cache: what was read before: the L bags follow it and are added to it.

        Returns:
            (B, L, V) logits, or the scalar loss in nats a token.
        """
        output: Tensor = self.lm_head(self.model(bags_BLS, cache), targets_BLS, weighting)
        return output

    @property
    def blocks(self) -> list[nn.Module]:
        """The layers that repeat, for :func:`tst_lightning.parallel.parallelise`."""
        return list(self.model.layers)

    def _tie(self) -> None:
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Transformer:
        # Leaving the meta device (to_empty) makes new parameters, one for each module, and so cuts the tie.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._tie()
        return self


def _residual_std(config: TransformerConfig) -> float:
    return config.initializer_range / math.sqrt(2 * config.num_hidden_layers)
