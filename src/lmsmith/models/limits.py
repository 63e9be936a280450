"""What a model's build allows: how long a sequence may be, and whether a Session can run it.

Not for: what a method may ask of a model (`lmsmith.models.lm`, `LM.offers`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from lmsmith.errors import CapabilityError

# The context of a model that names no last position: state space, ALiBi, relative positions.
NO_LIMIT = sys.maxsize
_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")


def context_of(config: Any) -> int:
    """Most positions that a sequence may have, `NO_LIMIT` where the model sets no limit.

    A model whose positions change with the length of the sequence counts up to where they change.
    """
    sizes = (getattr(config, name, None) for name in _CONTEXT_NAMES)
    named = next((size for size in sizes if isinstance(size, int) and size > 0), NO_LIMIT)
    return min([named, *turning_points(config)])


def turning_points(config: Any) -> Iterator[int]:
    """Lengths past which longrope turns every key of a sequence, those cached before included.

    Dynamic NTK scaling does so past the context itself.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters, *(p for p in parameters.values() if isinstance(p, Mapping))]
    for kind in kinds:
        if kind.get("rope_type") == "longrope":
            yield int(kind["original_max_position_embeddings"])


def need_plain_decoder(model: Any) -> None:
    """Check that a Session can run a model: its attention is replaced and its head called.

    Raises:
        CapabilityError: It cannot.
    """
    kind = type(model).__name__
    decoder = model.get_decoder() if model.can_generate() else None
    config = getattr(decoder, "config", None)
    if (
        config is None
        or getattr(config, "is_encoder_decoder", False)
        or not hasattr(config, "num_attention_heads")
    ):
        raise CapabilityError("a Session", "a decoder with attention layers", kind)
    if not getattr(model, "_supports_attention_backend", False):
        raise CapabilityError(
            "a Session", "attention that can be replaced", f"{kind}, which has its own"
        )
    if getattr(config, "kv_lora_rank", None) or _value_width(config) != key_width(config):
        raise CapabilityError(
            "a Session",
            "keys and values of one width",
            f"{kind}, whose attention is latent or has narrower values",
        )
    head = model.get_output_embeddings()
    if not any(child is head for child in model.children()):
        raise CapabilityError("a Session", "a head of one linear layer", f"{kind}, whose has more")


def key_width(config: Any) -> int:
    """Width of one head's keys."""
    named = getattr(config, "head_dim", None)
    return named or config.hidden_size // config.num_attention_heads


def _value_width(config: Any) -> int:
    return getattr(config, "v_head_dim", None) or key_width(config)
