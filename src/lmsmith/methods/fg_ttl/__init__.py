"""Future-Gain guided test-time learning (Bian et al., ICML 2026): adapt while answering.

The problem: a model meets prompts that have shifted, and nobody labels them. Making it surer of its
own answers (entropy minimisation) also makes it surer of its mistakes, and in the end collapses it.

The idea: answer a batch, then learn from the answers only where uncertainty falls from the window
before a token to the window after it, and the less the more uncertain the token is. With
G(t) = mean H[t-N..t-1] - mean H[t+1..t+N], over the top 20 % by G, the loss on a LoRA adapter is
L = sum_t softmax(G / tau)_t H(softmax(z_t / T_t)), T_t = 1 + alpha H_t, weights and T constant.

Simplified: nothing; added are a guard that rolls a collapsing adapter back, and an audit log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmsmith.methods.fg_ttl.adaptation import Adaptation as Adaptation
    from lmsmith.methods.fg_ttl.adaptation import Answer as Answer
    from lmsmith.methods.fg_ttl.adaptation import adapt as adapt
    from lmsmith.methods.fg_ttl.config import FGTTLConfig as FGTTLConfig
    from lmsmith.methods.fg_ttl.config import official_code as official_code
    from lmsmith.methods.fg_ttl.config import small as small
    from lmsmith.methods.fg_ttl.selection import Selection as Selection
    from lmsmith.methods.fg_ttl.selection import select as select

_HOME = {
    "Adaptation": "adaptation",
    "Answer": "adaptation",
    "FGTTLConfig": "config",
    "Selection": "selection",
    "adapt": "adaptation",
    "official_code": "config",
    "select": "selection",
    "small": "config",
}

__all__ = [
    "Adaptation",
    "Answer",
    "FGTTLConfig",
    "Selection",
    "adapt",
    "official_code",
    "select",
    "small",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
