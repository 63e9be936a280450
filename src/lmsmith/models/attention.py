"""The attention that a model runs while a Session drives it.

The only file that touches transformers' attention interface. Which slots a token sees is decided
in `lmsmith.models.kv`; the mask arrives here ready made.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import AttentionInterface

from lmsmith.errors import CapabilityError

ATTENTION = "lmsmith_session"
# Up to this many new tokens the heads of a group are folded into the query axis, so the mask is
# repeated once a group; beyond it the repeated mask would cost more than the kernel's own grouping.
FOLD_LIMIT = 64


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over cached keys, without a copy of them for every head of a group.

    Args:
        module: The model's attention module; not read.
        query: `[lanes, heads, new, head_dim]`.
        key: `[lanes, kv_heads, used, head_dim]`.
        value: As `key`.
        attention_mask: From `KVStore.layout`.
        scaling: Factor of the scores; `head_dim ** -0.5` when `None`.
        dropout: Ignored: a session only infers.
        softcap: Bound of the scores, for models that have one (Gemma 2).
        **kwargs: What else the model hands its attention; the sliding window is in the mask.

    Returns:
        `[lanes, new, heads, head_dim]`, and no weights.

    Raises:
        CapabilityError: The model's attention has sinks or a position bias.
    """
    for name in ("s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise CapabilityError("a Session", "plain softmax attention", f"attention with {name}")
    lanes, heads, new, _ = query.shape
    group = heads // key.shape[1]
    fold = group > 1 and (new == 1 or (attention_mask is not None and new <= FOLD_LIMIT))
    if fold:
        query = query.reshape(lanes, key.shape[1], group * new, -1)
    causal = attention_mask is None and new > 1
    if softcap is not None:
        mixed = _softcapped(query, key, value, attention_mask, scaling, softcap, causal)
    else:
        mixed = torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            scale=scaling,
            is_causal=causal,
            enable_gqa=group > 1 and not fold,
        )
    return mixed.reshape(lanes, heads, new, -1).transpose(1, 2), None


def _softcapped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float,
    causal: bool,
) -> Tensor:
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.transpose(2, 3) * (scaling or query.shape[-1] ** -0.5)
    scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    elif causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value


AttentionInterface.register(ATTENTION, attend)


_locks: WeakKeyDictionary[Any, threading.RLock] = WeakKeyDictionary()
_making = threading.Lock()


@contextmanager
def session_attention(model: torch.nn.Module, config: Any) -> Iterator[None]:
    """Let a model attend through `attend`, within the context only; threads take turns.

    The name has no mask function of its own, so transformers hands our mask on as it is.

    Args:
        model: Whose turn it is.
        config: The configuration that its attention modules read.
    """
    with _making:
        turn = _locks.setdefault(model, threading.RLock())
    with turn:
        own = config._attn_implementation
        if own == ATTENTION:  # within a forward of the same thread; the outer one restores
            yield
            return
        config._attn_implementation_internal = ATTENTION
        try:
            yield
        finally:
            config._attn_implementation_internal = own
