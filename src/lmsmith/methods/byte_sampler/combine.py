"""Several models as one: mixtures, products and proxy tuning over next-byte distributions.

Bytes are the vocabulary that models with different tokenizers share, so their distributions can be
added and multiplied. Everything here is pure: tensors in, a normalised tensor out.

Shapes: `logprobs  # [models, ..., 257]`, each vector normalised, in nats; entry 256 is `stop`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def mix(logprobs: Tensor) -> Tensor:
    """Average the models' probabilities (paper, section 4.3; official code `mix`)."""
    if len(logprobs) == 1:
        return logprobs[0]
    return torch.logsumexp(logprobs, dim=0) - math.log(len(logprobs))


def product(logprobs: Tensor, power: float | None = None) -> Tensor:
    """Multiply the models' probabilities, each to `power` (default 1/models), and renormalise.

    Where every byte is ruled out by some model, which truncation can bring about, it is `mix`.
    """
    if len(logprobs) == 1 and power in (None, 1.0):
        return logprobs[0]
    power = 1.0 / len(logprobs) if power is None else power
    return _normalised(power * logprobs.sum(dim=0), mix(logprobs))


def proxy(base: Tensor, expert: Tensor, antiexpert: Tensor, alpha: float = 1.0) -> Tensor:
    """Steer `base` by what tuning changed in a smaller model, whatever its tokenizer.

    log p = log base + alpha (log expert - log antiexpert), renormalised (paper, section 4.4). A
    byte that the base rules out stays ruled out. Where the antiexpert rules a byte out there is no
    ratio, and taken as infinite it would give the byte all the mass: it keeps the base's value
    (likewise where the expert does and alpha is negative). With alpha = 0, or where nothing at all
    is left, the result is `base`.
    """
    if alpha == 0:
        return base
    change = alpha * (expert - antiexpert)
    change = change.masked_fill(change.isnan() | (change == math.inf), 0.0)
    return _normalised(base + change, base)


def _normalised(masses: Tensor, otherwise: Tensor) -> Tensor:
    """Log-masses as log-probabilities; `otherwise` for vectors without mass."""
    nothing = (masses == -math.inf).all(dim=-1, keepdim=True)
    return torch.where(nothing, otherwise, torch.log_softmax(masses, dim=-1))
