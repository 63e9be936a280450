"""The idea itself: no model, no input or output."""

from __future__ import annotations

from dataclasses import replace

from lmsmith.decoding.events import Sampling


def sharpen(sampling: Sampling, factor: float) -> Sampling:
    """The same way of drawing at `factor` times the temperature."""
    return replace(sampling, temperature=sampling.temperature * factor)
