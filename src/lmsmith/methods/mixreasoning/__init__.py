"""Think where a step is hard, be brief elsewhere (MixReasoning, Lu et al., ICML 2026).

The problem: a reasoning model spends long chains of thought evenly, though few steps are hard.

The idea: one answer alternates between the base model (thinking) and the base model with a small
LoRA trained on short correct answers (concise). Token confidence c_t = -(1/k) sum of the k largest
log p_t, averaged over the last m tokens, decides: below tau_low in concise mode, go back m-1 tokens
and think; above tau_high in thinking mode, be brief again; never within m tokens of a switch.

Simplified: nothing in the decoder; what the paper leaves open is listed on the card.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmsmith.methods.mixreasoning.calibration import Calibration as Calibration
    from lmsmith.methods.mixreasoning.confidence import token_confidence as token_confidence
    from lmsmith.methods.mixreasoning.config import MixReasoningConfig as MixReasoningConfig
    from lmsmith.methods.mixreasoning.controller import Controller as Controller
    from lmsmith.methods.mixreasoning.controller import Mode as Mode
    from lmsmith.methods.mixreasoning.controller import Rule as Rule
    from lmsmith.methods.mixreasoning.decoder import MixDecoder as MixDecoder

_HOME = {
    "Calibration": "calibration",
    "Controller": "controller",
    "MixDecoder": "decoder",
    "MixReasoningConfig": "config",
    "Mode": "controller",
    "Rule": "controller",
    "token_confidence": "confidence",
}

__all__ = [
    "Calibration",
    "Controller",
    "MixDecoder",
    "MixReasoningConfig",
    "Mode",
    "Rule",
    "token_confidence",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
