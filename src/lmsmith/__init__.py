"""A workbench for open-weight language models.

    import lmsmith

    lm = lmsmith.open_model("smollm2-135m")
    [done] = lmsmith.generate(lm, ["The sky is bl"], method="byte-sampler", max_tokens=40)
    print(done.text)

Names are imported when they are first used, so that `import lmsmith` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmsmith.decoding.events import Event, Request, Sampling, Trace
    from lmsmith.decoding.generate import Completion, generate, make_decoder, stream
    from lmsmith.errors import LmsmithError
    from lmsmith.evaluation.bench import run_bench
    from lmsmith.models import LM, Session, open_model

__version__ = "0.1.0"

_HOMES = {
    "LM": "lmsmith.models",
    "Session": "lmsmith.models",
    "open_model": "lmsmith.models",
    "Completion": "lmsmith.decoding.generate",
    "generate": "lmsmith.decoding.generate",
    "make_decoder": "lmsmith.decoding.generate",
    "stream": "lmsmith.decoding.generate",
    "Event": "lmsmith.decoding.events",
    "Request": "lmsmith.decoding.events",
    "Sampling": "lmsmith.decoding.events",
    "Trace": "lmsmith.decoding.events",
    "run_bench": "lmsmith.evaluation.bench",
    "LmsmithError": "lmsmith.errors",
}

__all__ = [
    "LM",
    "Completion",
    "Event",
    "LmsmithError",
    "Request",
    "Sampling",
    "Session",
    "Trace",
    "generate",
    "make_decoder",
    "open_model",
    "run_bench",
    "stream",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lmsmith' has no attribute {name!r}")
    import importlib

    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
