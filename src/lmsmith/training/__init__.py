"""Train a model, or a LoRA adapter for it, on examples: one loop for all that learns.

The names below are imported on first use, so that `import lmsmith.training` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmsmith.training.batches import Batch, collate
    from lmsmith.training.data import Tokens, encode, load_examples
    from lmsmith.training.loop import Loop, Step
    from lmsmith.training.loss import Loss, NextTokenLoss, chunked_cross_entropy, hidden_states
    from lmsmith.training.run import Trained, train
    from lmsmith.training.settings import TrainSettings

_HOMES = {
    "Batch": "batches",
    "Loop": "loop",
    "Loss": "loss",
    "NextTokenLoss": "loss",
    "Step": "loop",
    "Tokens": "data",
    "TrainSettings": "settings",
    "Trained": "run",
    "chunked_cross_entropy": "loss",
    "collate": "batches",
    "encode": "data",
    "hidden_states": "loss",
    "load_examples": "data",
    "train": "run",
}

__all__ = [
    "Batch",
    "Loop",
    "Loss",
    "NextTokenLoss",
    "Step",
    "Tokens",
    "TrainSettings",
    "Trained",
    "chunked_cross_entropy",
    "collate",
    "encode",
    "hidden_states",
    "load_examples",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module = importlib.import_module(f"{__name__}.{_HOMES[name]}")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
