"""How the method plugs into a model and yields events."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from lmsmith.decoding.events import Decoder, Event, Request
from lmsmith.decoding.plain import PlainDecoder
from lmsmith.models import LM

from .config import TemplateMethodConfig
from .controller import sharpen


def make(models: Sequence[LM], config: TemplateMethodConfig) -> Decoder:
    """The card's decoder entry."""
    return TemplateMethodDecoder(models[0], config)


class TemplateMethodDecoder:
    """The plain decoder with a sharper distribution."""

    def __init__(self, lm: LM, config: TemplateMethodConfig) -> None:
        self._plain = PlainDecoder(lm)
        self._config = config

    def admit(self, request: Request) -> int:
        """Take a request in and return its row id."""
        sampling = sharpen(request.sampling, self._config.factor)
        return self._plain.admit(replace(request, sampling=sampling))

    def step(self) -> list[Event]:
        """Advance every active row by one forward pass."""
        return [replace(event, info=_info(event)) for event in self._plain.step()]

    def retire(self, row: int) -> Event | None:
        """Cancel a row and free its cache."""
        return self._plain.retire(row)

    @property
    def active(self) -> int:
        """Number of rows still at work."""
        return self._plain.active


def _info(event: Event) -> dict[str, float]:
    """What `lmsmith generate --show` colours the text by: how sure the model was."""
    if not event.logprobs:
        return {}
    return {"signal": math.exp(sum(event.logprobs) / len(event.logprobs))}
