"""How sure a model is of its next token: one number a distribution, higher is surer.

All but the full entropy look at the k likeliest tokens only. Computed in float32 at least: in half
precision the probabilities of the tail become 0 and their logarithms infinite.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def top_logprobs(logits: Tensor, k: int) -> Tensor:
    """Log-probabilities of the k likeliest tokens, falling.

    Args:
        logits: Raw logits, `[..., vocabulary]`.
        k: How many; at most the vocabulary.

    Returns:
        `[..., k]`, in nats.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide.log_softmax(-1).topk(min(k, logits.shape[-1])).values


def token_confidence(logits: Tensor, k: int = 20) -> Tensor:
    """Token confidence c_t = -(1/k) sum of the k largest log p_t (paper, equation 2).

    High means sure: a peaked distribution makes the other candidates improbable and their negative
    logarithms large. It is at least log k, where the k candidates share all probability evenly.

    Args:
        logits: Raw logits of the mode at work, at temperature 1, `[..., vocabulary]`.
        k: Candidates.

    Returns:
        `[...]`, in nats.
    """
    return -top_logprobs(logits, k).mean(-1)


def max_probability(logits: Tensor, k: int = 20) -> Tensor:
    """Probability of the likeliest token, `[...]` (ablation, paper's table of criteria)."""
    return top_logprobs(logits, 1)[..., 0].exp()


def margin(logits: Tensor, k: int = 20) -> Tensor:
    """Probability of the likeliest token less that of the second, `[...]` (ablation)."""
    top = top_logprobs(logits, 2).exp()
    return top[..., 0] - top[..., 1]


def negative_entropy(logits: Tensor, k: int = 20) -> Tensor:
    """Minus the entropy of the k likeliest tokens, made to sum to 1, `[...]` in nats (ablation)."""
    return -_entropy(top_logprobs(logits, k).log_softmax(-1))


def certainty(logits: Tensor, k: int = 20, norm: str = "candidates") -> Tensor:
    """1 less the normalised entropy u_t of version 1, `[...]` in [0, 1].

    Args:
        logits: Raw logits, `[..., vocabulary]`.
        k: Candidates.
        norm: `candidates`: entropy of the k likeliest over log k; `vocabulary`: of the whole
            distribution over log |V|.
    """
    if norm == "vocabulary":
        k = logits.shape[-1]
    top = top_logprobs(logits, k).log_softmax(-1)
    return 1 - _entropy(top) / math.log(max(2, top.shape[-1]))


def _entropy(logprobs: Tensor) -> Tensor:
    # A candidate of probability 0 adds nothing; 0 * -inf would be no number.
    return -(logprobs.exp() * logprobs.clamp_min(torch.finfo(logprobs.dtype).min)).sum(-1)


SIGNALS = {
    "confidence": token_confidence,
    "reverse": token_confidence,
    "max-probability": max_probability,
    "margin": margin,
    "entropy": negative_entropy,
}
"""Criteria that are a signal of the distribution, averaged over the window."""
