"""The model over whole texts, with gradients for the adapter, and without ever holding all logits.

A text's logits are positions times vocabulary: 5 GB in float32 for 8,192 tokens of a 152 k
vocabulary. So only final hidden states are kept, and what is needed of the logits (an entropy, a
surprise) is computed a few positions at a time and computed again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lmsmith.models import LM
from lmsmith.models.head import head_logits


@dataclass(frozen=True)
class Text:
    """A prompt with its answer.

    Attributes:
        ids: Token ids of both.
        start: Where the answer begins: the prompt's length.
    """

    ids: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class Rows:
    """Texts side by side, and what the model made of them.

    Attributes:
        ids: `[rows, positions]`, right-padded.
        starts: `[rows]`; where the answers begin.
        lengths: `[rows]`.
        hidden: `[rows, positions, width]`; final hidden states, of no meaning past a row's length.
    """

    ids: Tensor
    starts: Tensor
    lengths: Tensor
    hidden: Tensor


def read(lm: LM, texts: Sequence[Text], strength: float = 1.0) -> Rows:
    """One forward pass over texts.

    A causal model's state at a token does not depend on what is to its right, so padding there
    needs no mask.

    Args:
        lm: The model, its adapter attached.
        texts: What to read.
        strength: Of the adapter; 0 is the model without it.
    """
    lengths = [len(text.ids) for text in texts]
    ids = torch.zeros(len(texts), max(lengths), dtype=torch.long)
    for row, text in enumerate(texts):
        ids[row, : len(text.ids)] = torch.tensor(text.ids)
    ids = ids.to(lm.device)
    assert lm.adapter is not None
    with lm.adapter.at(strength):
        decoder = lm.model.get_decoder()
        hidden = decoder(input_ids=ids, use_cache=False).last_hidden_state
    return Rows(
        ids,
        torch.tensor([text.start for text in texts], device=lm.device),
        torch.tensor(lengths, device=lm.device),
        hidden,
    )


def over_positions(
    lm: LM,
    hidden: Tensor,
    measure: Callable[..., Tensor],
    *along: Tensor,
    chunk: int = 256,
) -> Tensor:
    """Something of each position's logits, computed for `chunk` positions at a time.

    Args:
        lm: The model whose head gives the logits.
        hidden: `[positions, width]`; final hidden states.
        measure: From logits `[some, vocabulary]`, and the same part of each of `along`, to
            `[some, ...]`.
        along: Tensors `[positions, ...]` that go with the positions.
        chunk: Positions whose logits exist at one time.

    Returns:
        `[positions, ...]`; gradients flow to `hidden`.
    """

    def piece(part: Tensor, *others: Tensor) -> Tensor:
        return measure(head_logits(lm.model, part), *others)

    if not len(hidden):
        return hidden.new_zeros(0, dtype=torch.float32)
    found = []
    for start in range(0, len(hidden), chunk):
        parts = [tensor[start : start + chunk] for tensor in (hidden, *along)]
        if torch.is_grad_enabled() and hidden.requires_grad:
            found.append(checkpoint(piece, *parts, use_reentrant=False, preserve_rng_state=False))
        else:
            found.append(piece(*parts))
    return torch.cat(found)
