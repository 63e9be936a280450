"""Sample from a language model one byte at a time (Hayase et al., ICML 2026).

The problem: a prompt that ends inside what the model would have written as one token is not the
prefix that the model was trained on; conditioning on its tokens loses most of what it knows.

The idea: P(next byte b | prefix) = sum of p(T) over all valid token sequences T that cover the
prefix and have b next, over the same sum for all b. A sequence is valid when the tokenizer would
write it; for BPE that is a test on adjacent pairs, so the sequences form a small tree (`tree`):
one new node a byte, one forward call a byte. What speaks bytes can be mixed: models with different
tokenizers are averaged, multiplied, or steered by a tuned and an untuned small model (`combine`).

Simplified: nothing; bytes that cannot continue a UTF-8 text are masked and their mass reported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmsmith.methods.byte_sampler.config import ByteSamplerConfig as ByteSamplerConfig
    from lmsmith.methods.byte_sampler.decoder import ByteDecoder as ByteDecoder
    from lmsmith.methods.byte_sampler.reader import ByteReader as ByteReader
    from lmsmith.methods.byte_sampler.scoring import bits_per_byte as bits_per_byte
    from lmsmith.methods.byte_sampler.scoring import byte_logprobs as byte_logprobs
    from lmsmith.methods.byte_sampler.scoring import score as score
    from lmsmith.methods.byte_sampler.tree import CoveringTree as CoveringTree
    from lmsmith.methods.byte_sampler.vocabulary import ByteTokens as ByteTokens

_HOME = {
    "ByteDecoder": "decoder",
    "ByteReader": "reader",
    "ByteSamplerConfig": "config",
    "ByteTokens": "vocabulary",
    "CoveringTree": "tree",
    "bits_per_byte": "scoring",
    "byte_logprobs": "scoring",
    "score": "scoring",
}

__all__ = [
    "ByteDecoder",
    "ByteReader",
    "ByteSamplerConfig",
    "ByteTokens",
    "CoveringTree",
    "bits_per_byte",
    "byte_logprobs",
    "score",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
