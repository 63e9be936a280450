"""What is minimised: risk-aware entropy (RAA) and its relatives, as pure functions of logits.

With H the entropy of a distribution and z its logits, FG-TTL's loss over the selected positions is

    L = sum_t w_t H(softmax(z_t / T_t)),   w = softmax(G / tau),   T_t = 1 + alpha H_t,

where w and T are constants to the gradient. Tent is w uniform and T = 1 over all of the answer;
every other objective on answers is another choice of positions, w, T, or measure of uncertainty.

Shapes: `logits  # [..., vocabulary]`, everything else `[...]`; nats; float32 at least.

Not for: which positions (`selection`), or where logits come from (`forward`).
"""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

T = TypeVar("T", float, Tensor)


def entropy(logits: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
    """Shannon entropy of softmax(logits / temperature), `[..., vocabulary] -> [...]` in nats.

    Args:
        logits: Raw logits.
        temperature: One for all, or one a distribution `[...]`; gradients go through it only if
            it has them.
    """
    if isinstance(temperature, Tensor):
        temperature = temperature[..., None]
    logp = torch.log_softmax(_wide(logits) / temperature, dim=-1)
    # A ruled-out token has p = 0 and log p = -inf, and 0 * -inf is no number.
    return -(logp.exp() * logp.clamp_min(torch.finfo(logp.dtype).min)).sum(-1)


def opinion_entropy(logits: Tensor, mass: float) -> Tensor:
    """COME's uncertainty: entropy of the subjective opinion e^z / (sum e^z + mass) and its rest.

    The rest, mass / (sum e^z + mass), is the belief that is left uncommitted, so a large common
    shift of the logits, not only their differences, makes the model confident. The logits' norm
    is a constant to the gradient, so that it cannot be grown to lower the loss.

    Args:
        logits: Raw logits.
        mass: Uncertainty mass: the number of classes.

    Source: official code of COME (Zhang et al., ICLR 2025), `dirichlet_entropy`.
    """
    z = _wide(logits)
    norm = z.norm(dim=-1, keepdim=True)
    z = z / norm * norm.detach()
    rest = z.new_full((*z.shape[:-1], 1), math.log(mass))
    opinion = torch.softmax(torch.cat([z, rest], dim=-1), dim=-1) + 1e-7
    return -(opinion * opinion.log()).sum(-1)


def risk_temperature(entropy: Tensor, alpha: float = 0.5) -> Tensor:
    """T = 1 + alpha H, a constant: uncertain positions are flattened and pushed less."""
    return 1.0 + alpha * entropy.detach()


def gain_weights(gain: Tensor, tau: float = 1.0) -> Tensor:
    """Softmax of G / tau over all selected positions, `[selected]`; a constant."""
    return torch.softmax(_wide(gain.detach()) / max(tau, 1e-6), dim=0)


def uniform_weights(count: int, like: Tensor) -> Tensor:
    """1 / count for each of `count` positions."""
    return torch.full((count,), 1.0 / max(1, count), dtype=torch.float32, device=like.device)


def eata_margin(vocabulary: int) -> float:
    """EATA's bound on the entropy of what is reliable, nats (official code: (ln C) / 2 - 1)."""
    return math.log(vocabulary) / 2 - 1


def sar_margin(vocabulary: int) -> float:
    """SAR's bound on the entropy of what is reliable, nats (official code: 0.4 ln C)."""
    return 0.4 * math.log(vocabulary)


def eata_weights(entropy: Tensor, margin: float) -> Tensor:
    """EATA's exp(E_0 - H) over its kept positions, divided by their number; a constant."""
    weights = torch.exp(margin - _wide(entropy.detach()))
    return weights / max(1, len(weights))


def fading_mean(mean: T | None, new: T) -> T:
    """EATA's and SAR's running mean: 0.9 of the old and 0.1 of the new."""
    return new if mean is None else 0.9 * mean + 0.1 * new


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Surprise at each target, `[..., vocabulary] and [...] -> [...]` in nats."""
    flat = functional.cross_entropy(
        _wide(logits).flatten(0, -2), targets.flatten(), reduction="none"
    )
    return flat.view(targets.shape)


def tlm_loss(perplexities: Tensor, threshold: float = 3.0, scale: float = 0.1) -> Tensor | None:
    """TLM's loss on prompts: hard ones only, the harder the more.

    Args:
        perplexities: `[prompts]`; mean next-token cross-entropy of each prompt, nats.
        threshold: Nats; easier prompts are left out.
        scale: Weight of a prompt at the threshold; it grows by e a nat.

    Returns:
        The sum of weighted cross-entropies over the number of prompts kept; none if there are none.

    Source: official code of TLM (Hu et al., ICML 2025).
    """
    kept = perplexities > threshold
    if not bool(kept.any()):
        return None
    hard = perplexities[kept]
    return (scale * torch.exp(hard.detach() - threshold) * hard).mean()


def _wide(x: Tensor) -> Tensor:
    """Float32 at least: entropies of a large vocabulary are lost in sixteen bits."""
    return x if x.dtype == torch.float64 else x.float()
