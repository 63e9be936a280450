"""Signs that an adapting model collapses.

Three, because collapse has several faces: the model says other things than it used to (divergence
from the model as it was given), it is sure of everything (entropy), or it repeats itself. The
first two are read off the texts of the batch before the next one is answered; repetition shows
only in new answers, so it is read off those before they are given out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmsmith.methods.fg_ttl.config import FGTTLConfig
from lmsmith.methods.fg_ttl.forward import Text, over_positions, read
from lmsmith.methods.fg_ttl.learner import Learner
from lmsmith.models.head import head_logits


@dataclass(frozen=True)
class Signs:
    """How far an update has moved a model, over the answers of a batch.

    Attributes:
        kl: Mean KL(adapted || before all learning), nats a token.
        entropy: Mean entropy, nats a token.
        entropy_before: The same before all learning.
    """

    kl: float
    entropy: float
    entropy_before: float


@torch.no_grad()
def signs(learner: Learner, texts: Sequence[Text]) -> Signs | None:
    """Read the signs off answered texts; none if there is no answer.

    Taken at the distributions that the answers' tokens were drawn from.
    """
    texts = [text for text in texts if len(text.ids) > text.start]
    if not texts:
        return None
    lm = learner.lm
    now = read(lm, texts)
    with learner.at(learner.initial):
        before = read(lm, texts)
    places = torch.arange(now.ids.shape[1], device=now.ids.device) + 1
    drawn = (places >= now.starts[:, None]) & (places < now.lengths[:, None])

    def compare(logits: Tensor, hidden: Tensor) -> Tensor:
        p = torch.log_softmax(logits.float(), -1)
        q = torch.log_softmax(head_logits(lm.model, hidden).float(), -1)
        return torch.stack(
            [(p.exp() * (p - q)).sum(-1), -(p.exp() * p).sum(-1), -(q.exp() * q).sum(-1)], dim=-1
        )

    found = over_positions(
        lm, now.hidden[drawn], compare, before.hidden[drawn], chunk=learner.config.logits_chunk
    )
    return Signs(*found.double().mean(0).tolist())


def trouble(found: Signs | None, config: FGTTLConfig) -> str:
    """What is wrong with a model of these signs; empty if nothing is."""
    if found is None:
        return ""
    # Written so that what is no number is trouble.
    if not found.kl <= config.guard_kl:
        return f"KL to the base is {found.kl:.3g} nats a token, above {config.guard_kl:g}"
    least = config.guard_entropy * found.entropy_before
    if not found.entropy >= least:
        return (
            f"entropy is {found.entropy:.3g} nats a token, below {config.guard_entropy:g} of the "
            f"base's {found.entropy_before:.3g}"
        )
    return ""


def repetition(answers: Sequence[Sequence[int]], size: int = 4) -> float:
    """Mean share of an answer's n-grams that it has had before; 0 for one without any."""
    shares = []
    for ids in answers:
        grams = [tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)]
        shares.append(1 - len(set(grams)) / len(grams) if grams else 0.0)
    return sum(shares) / max(1, len(shares))
