"""The shape of the Transformer. Imports no PyTorch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from tst_lightning.errors import UserError

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True)
class TransformerConfig:
    """The shape of a Llama-style dense Transformer, in Hugging Face's names (``LlamaConfig``).

    Raises :class:`~tst_lightning.errors.UserError` naming every fault at once.

    Attributes:
        vocab_size: rows of the embedding and of the output layer (V).
        hidden_size: width of the residual stream (D).
        intermediate_size: width of the SwiGLU feed-forward layer.
        num_hidden_layers: Transformer blocks.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads; ``None`` becomes ``num_attention_heads``.
        head_dim: width of a head; ``None`` becomes ``hidden_size / num_attention_heads``.
        rope_theta: base of the rotary position embedding's wavelengths.
        rms_norm_eps: what RMSNorm adds to the mean square.
        tie_word_embeddings: whether the output layer shares the embedding's weight.
        initializer_range: standard deviation of the initial weights.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        faults = [
            f"{name}={value!r} must be a whole number of at least 1"
            for name in _REQUIRED
            if not _is_count(value := getattr(self, name))
        ]
        faults += [
            f"{name}={value!r} must be a whole number of at least 1, or null for its default"
            for name in ("num_key_value_heads", "head_dim")
            if (value := getattr(self, name)) is not None and not _is_count(value)
        ]
        faults += [
            f"{name}={value!r} must be a positive, finite number"
            for name in ("rope_theta", "rms_norm_eps", "initializer_range")
            if not _is_positive(value := getattr(self, name))
        ]
        tied: Any = self.tie_word_embeddings
        if not isinstance(tied, bool):
            faults.append(f"tie_word_embeddings={tied!r} must be true or false")

        width, heads = self.hidden_size, self.num_attention_heads
        kv_heads, head_dim = self.num_key_value_heads, self.head_dim
        if _is_count(heads):
            if kv_heads is None:
                kv_heads = heads
            elif _is_count(kv_heads) and heads % kv_heads:
                faults.append(
                    f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}: "
                    "every key and value head serves the same number of query heads"
                )
            if head_dim is None and _is_count(width):
                if width % heads:
                    faults.append(
                        f"hidden_size={width} is not a multiple of num_attention_heads={heads}: change "
                        "one, or give head_dim"
                    )
                else:
                    head_dim = width // heads
        if head_dim is not None and _is_count(head_dim) and head_dim % 2:
            faults.append(f"head_dim={head_dim} must be even: the rotary embedding turns pairs")
        if faults:
            raise UserError(faults)
        object.__setattr__(self, "num_key_value_heads", kv_heads)
        object.__setattr__(self, "head_dim", head_dim)

    @classmethod
    def preset(cls, name: str) -> TransformerConfig:
        """One of :data:`PRESETS`.

        Raises:
            UserError: for an unknown name.
        """
        if name not in PRESETS:
            raise UserError(f"there is no shape {name!r}: choose one of {', '.join(PRESETS)}")
        return PRESETS[name]

    @property
    def num_parameters(self) -> int:
        """Trainable parameters; a tied output layer is not counted again."""
        assert self.num_key_value_heads and self.head_dim
        width = self.hidden_size
        attention = width * self.head_dim * 2 * (self.num_attention_heads + self.num_key_value_heads)
        feed_forward = 3 * width * self.intermediate_size
        norms = 2 * width
        tables = 1 if self.tie_word_embeddings else 2
        blocks = self.num_hidden_layers * (attention + feed_forward + norms)
        return tables * self.vocab_size * width + blocks + width

    def flops_per_token(self, latent_length: int) -> int:
        """Training FLOPs (forward and backward) of one latent token in a window of ``latent_length``.

        Six for each weight of a matrix product, plus attention's two products over the whole window: the half
        that the causal mask hides is counted too, and the embedding lookup and the norms are not (PaLM's
        convention, Chowdhery et al. 2022, appendix B, https://arxiv.org/abs/2204.02311). A superposition step
        costs what an ordinary one does, so the bag size is no argument.
        """
        assert self.head_dim
        # every table but the output layer's, which multiplies also where it shares the embedding's weight
        lookup = 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size
        norms = (2 * self.num_hidden_layers + 1) * self.hidden_size
        weights = self.num_parameters - lookup - norms
        return 6 * weights + 12 * self.num_hidden_layers * self.num_attention_heads * self.head_dim * latent_length

    def to_dict(self) -> dict[str, Any]:
        """Plain types, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> TransformerConfig:
        """The inverse of :meth:`to_dict`.

        Raises:
            UserError: for unknown, missing or wrong fields.
        """
        known = {field.name for field in fields(cls)}
        faults = [
            f"{name}={state[name]!r} is no field of the Transformer's shape: remove it (there are "
            f"{', '.join(sorted(known))})"
            for name in state
            if name not in known
        ]
        faults += [f"{name} is missing from the Transformer's shape" for name in _REQUIRED if name not in state]
        if faults:
            raise UserError(faults)
        return cls(**state)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


# The paper's two smallest dense models (arXiv 2605.06546): the shapes and the RoPE base of SmolLM2-135M and
# SmolLM2-360M (https://huggingface.co/HuggingFaceTB/SmolLM2-135M and .../SmolLM2-360M, config.json) with the
# vocabulary of Llama 3 (https://huggingface.co/meta-llama/Meta-Llama-3-8B), an untied output layer and full
# multi-head attention. The initialisation is ours: the paper names none.
PRESETS: dict[str, TransformerConfig] = {
    "270m": TransformerConfig(  # 267,225,408 parameters
        vocab_size=128_256,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        rope_theta=100_000.0,
    ),
    "600m": TransformerConfig(  # 600,208,320 parameters
        vocab_size=128_256,
        hidden_size=960,
        intermediate_size=2560,
        num_hidden_layers=32,
        num_attention_heads=15,
        rope_theta=100_000.0,
    ),
}
