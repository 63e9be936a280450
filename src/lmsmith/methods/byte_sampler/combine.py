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
    """Multiply the models' probabilities, each to `power` (default 1/models), and renormalise."""
    if len(logprobs) == 1 and power in (None, 1.0):
        return logprobs[0]
    power = 1.0 / len(logprobs) if power is None else power
    return torch.log_softmax(power * logprobs.sum(dim=0), dim=-1)


def proxy(base: Tensor, expert: Tensor, antiexpert: Tensor, alpha: float = 1.0) -> Tensor:
    """Steer `base` by what tuning changed in a smaller model, whatever its tokenizer.

    log p = log base + alpha (log expert - log antiexpert), renormalised (paper, section 4.4). A
    byte that the base model rules out stays ruled out; one that both small models rule out is
    left as the base has it. With alpha = 0 the result is `base` itself.
    """
    if alpha == 0:
        return base
    difference = torch.where(expert == antiexpert, 0.0, expert - antiexpert)
    steered = torch.where(base == -math.inf, base, base + alpha * difference)
    # An antiexpert that rules a byte out would put all mass on it; a large finite gap is enough.
    return torch.log_softmax(steered.nan_to_num(posinf=1e4, neginf=-math.inf), dim=-1)
