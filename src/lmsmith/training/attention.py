"""Attention among examples that lie end to end in one row: each sees itself and nothing else.

The sum of the examples' own squares is computed, not the square of the row, and no mask exists.
Transformers' attention interface hands every model's queries here; boundaries come as the keyword
that its flash attention reads too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from lmsmith.errors import CapabilityError

ATTENTION = "lmsmith_packed"


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    lengths: tuple[int, ...] = (),
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each example.

    Args:
        module: The model's attention module; not read.
        query: `[1, heads, tokens, head_dim]`.
        key: `[1, kv_heads, tokens, head_dim]`.
        value: As `key`.
        attention_mask: Unused; there is none.
        scaling: Factor of the scores; `head_dim ** -0.5` when `None`.
        dropout: Share of attention weights dropped.
        sliding_window: How many tokens back one sees, itself included; all when `None`.
        softcap: Bound of the scores (Gemma 2).
        lengths: Tokens of each example.
        **kwargs: What else the model hands its attention.

    Returns:
        `[1, tokens, heads, head_dim]`, and no weights.

    Raises:
        CapabilityError: The model's attention has sinks or a position bias.
    """
    for name in ("s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise CapabilityError("packing", "plain softmax attention", f"attention with {name}")
    if sum(lengths) != query.shape[2]:
        raise CapabilityError("packing", "a model that passes boundaries on", "none")
    mix = partial(_causal, scaling=scaling, dropout=dropout, window=sliding_window, softcap=softcap)
    if len(set(lengths)) == 1:  # one kernel call serves them all
        rows = len(lengths)
        q, k, v = (_rows(states, rows) for states in (query, key, value))
        mixed = mix(q, k, v).transpose(1, 2)
        return mixed.reshape(1, -1, *mixed.shape[2:]), None
    parts = zip(*(states.split(lengths, 2) for states in (query, key, value)), strict=True)
    mixed = torch.cat([mix(q, k, v) for q, k, v in parts], 2)
    return mixed.transpose(1, 2), None


def _rows(states: Tensor, rows: int) -> Tensor:
    """`[1, heads, rows * length, head_dim]` -> `[rows, heads, length, head_dim]`, a view."""
    return states[0].unflatten(1, (rows, -1)).transpose(0, 1)


def _causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    dropout: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    length, group = query.shape[2], query.shape[1] // key.shape[1]
    mask = None
    if window is not None and window < length:
        ones = torch.ones(length, length, dtype=torch.bool, device=query.device)
        mask = ones.tril() & ~ones.tril(-window)
    if softcap is None:
        return torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=group > 1,
        )
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(2, 3) * (scaling or query.shape[-1] ** -0.5)
    scores = torch.tanh(scores / softcap) * softcap
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1, dtype=torch.float32)
    return torch.nn.functional.dropout(weights, dropout).to(value.dtype) @ value


AttentionInterface.register(ATTENTION, attend)


@contextmanager
def packed_attention(config: Any) -> Iterator[None]:
    """Let the model of `config` attend through `attend`, within the context only.

    The name has no mask function of its own, so transformers builds no mask.
    """
    with _implementation(config, ATTENTION):
        yield


def same_when_recomputed(config: Any) -> tuple[AbstractContextManager, AbstractContextManager]:
    """Contexts of a checkpointed forward and of its recomputation, which comes after the context.

    Without them a recomputed block would attend in the model's own way, across examples.
    """
    return nullcontext(), _implementation(config, config._attn_implementation)


@contextmanager
def _implementation(config: Any, name: str) -> Iterator[None]:
    own = config._attn_implementation
    config._attn_implementation_internal = name
    try:
        yield
    finally:
        config._attn_implementation_internal = own
