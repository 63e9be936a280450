"""Tiny seeded models of every family and byte-level tokenizers, for tests of any method.

The names below are imported on first use, so that `import lmsmith.testing` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmsmith.testing.models import FAMILIES, WINDOW, tiny_lm, tiny_model
    from lmsmith.testing.tokenizers import ByteCodec, tiny_tokenizer

__all__ = ["FAMILIES", "WINDOW", "ByteCodec", "tiny_lm", "tiny_model", "tiny_tokenizer"]

_HOMES = {
    "FAMILIES": "models",
    "WINDOW": "models",
    "tiny_lm": "models",
    "tiny_model": "models",
    "ByteCodec": "tokenizers",
    "tiny_tokenizer": "tokenizers",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"lmsmith.testing.{_HOMES[name]}"), name)
