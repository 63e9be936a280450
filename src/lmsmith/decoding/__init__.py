"""How text is produced: the Decoder contract, its plain implementation, and what they share.

Names that need torch are imported when they are first used; the loop that runs prompts through a
decoder is in `lmsmith.decoding.generate`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lmsmith.decoding.events import Decoder, Event, Message, Prompt, Request, Sampling, Trace

if TYPE_CHECKING:
    from lmsmith.decoding.plain import PlainDecoder
    from lmsmith.decoding.rows import RowOutput
    from lmsmith.decoding.sampling import draw, filtered_probs, generator_for, sample
    from lmsmith.decoding.stop import StopStrings
    from lmsmith.decoding.text import ByteText, TokenText

_HOMES = {
    "PlainDecoder": "plain",
    "RowOutput": "rows",
    "draw": "sampling",
    "filtered_probs": "sampling",
    "generator_for": "sampling",
    "sample": "sampling",
    "StopStrings": "stop",
    "ByteText": "text",
    "TokenText": "text",
}

__all__ = [
    "ByteText",
    "Decoder",
    "Event",
    "Message",
    "PlainDecoder",
    "Prompt",
    "Request",
    "RowOutput",
    "Sampling",
    "StopStrings",
    "TokenText",
    "Trace",
    "draw",
    "filtered_probs",
    "generator_for",
    "sample",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
