"""Open a model by name, folder, hub id or GGUF file, and run it through a Session.

The names below are imported on first use, so that `import lmsmith.models` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmsmith.models.adapter import Adapter
    from lmsmith.models.lm import LM
    from lmsmith.models.opening import check_offers, load_tokenizer, offers_of, open_model
    from lmsmith.models.session import Session, Step, Tree

__all__ = [
    "LM",
    "Adapter",
    "Session",
    "Step",
    "Tree",
    "check_offers",
    "load_tokenizer",
    "offers_of",
    "open_model",
]

_HOMES = {
    "Adapter": "adapter",
    "LM": "lm",
    "Session": "session",
    "Step": "session",
    "Tree": "session",
    "check_offers": "opening",
    "load_tokenizer": "opening",
    "offers_of": "opening",
    "open_model": "opening",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module = importlib.import_module(f"{__name__}.{_HOMES[name]}")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
