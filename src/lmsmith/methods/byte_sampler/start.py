"""Which token stands before a text that has nothing before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmsmith.errors import CapabilityError

if TYPE_CHECKING:
    from lmsmith.methods.byte_sampler.vocabulary import ByteTokens
    from lmsmith.models.lm import LM


def start_token(lm: LM, tokens: ByteTokens) -> int:
    """The id of the token that a model's texts begin with.

    BOS where the tokenizer itself puts it before text. Otherwise `<|endoftext|>`, if there is such
    a token: models are trained on documents with it in between, while the BOS that a tokenizer
    names but does not use may open chat turns (SmolLM2's `<|im_start|>`). Else BOS, else an end
    token; the official code goes straight to these two.

    Raises:
        CapabilityError: The model has none of them.
    """
    separator = None if lm.adds_bos else tokens.literals.get("<|endoftext|>")
    if separator is not None:
        return separator
    if lm.bos_id is not None:
        return lm.bos_id
    if lm.eos_ids:
        return min(lm.eos_ids)
    raise CapabilityError(
        "byte-sampler", "a start token for so short a prompt", "neither BOS nor EOS"
    )
