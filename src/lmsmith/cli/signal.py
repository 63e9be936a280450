"""Streamed text on the terminal, coloured by what its method knows of each piece.

An event's `info` may hold `mode`, a word, or `signal`, a number between 0 and 1; without either the
signal is the probability of what was drawn. No method is known here by name.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from typing import Any

from lmsmith.decoding.events import Event, Trace


class Painter:
    """Writes events to standard output as they come.

    Args:
        show: Colour each piece, when standard output is a terminal or colour is forced.
    """

    def __init__(self, show: bool) -> None:
        self.show = show
        self._began = time.perf_counter()
        self._modes: list[str] = []
        self._inside = False  # whether the line that was written last is not ended yet

    def __enter__(self) -> Painter:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        # What is said about a text that broke off has a line of its own.
        if self._inside and failure is not None and not issubclass(failure, BrokenPipeError):
            self.end()

    def prompt(self, prompt: Any) -> None:
        """Write the prompt, quietly, in front of its continuation."""
        self._write(prompt if isinstance(prompt, str) else "", "quiet")

    def text(self, event: Event) -> None:
        """Write an event's text."""
        self._write(event.text, self._style(event) if self.show else None)

    def end(self) -> None:
        """End a row's text."""
        self._write("\n", None)

    def summary(self, traces: Sequence[Trace]) -> None:
        """Say on standard error how it went."""
        tokens = sum(trace.tokens_kept for trace in traces)
        # Not the rows' own times: of many prompts not all run at once.
        rate = f", {tokens / max(time.perf_counter() - self._began, 1e-9):.1f} a second"
        reasons = ", ".join(dict.fromkeys(trace.finish_reason for trace in traces))
        legend = ""
        if self.show:
            legend = f"; colours: {', '.join(self._modes) or 'orange is low, blue is high'}"
        sys.stderr.write(f"{tokens} tokens{rate}, ended by {reasons}{legend}\n")

    def _style(self, event: Event) -> str | None:
        from lmsmith.display import theme

        if "mode" in event.info:
            mode = str(event.info["mode"])
            if mode not in self._modes:
                self._modes.append(mode)
            return theme.SERIES[self._modes.index(mode) % len(theme.SERIES)]
        if "signal" in event.info:
            signal = float(event.info["signal"])
        elif event.logprobs:
            signal = math.exp(sum(event.logprobs) / len(event.logprobs))
        else:
            return None
        return _between(theme.ORANGE, theme.BLUE, min(max(signal, 0.0), 1.0))

    def _write(self, text: str, style: str | None) -> None:
        if not text:
            return
        self._inside = not text.endswith("\n")
        if style is None:
            sys.stdout.write(text)
        else:
            from rich.text import Text

            from lmsmith.display.theme import console

            console().print(Text(text, style=style), end="", soft_wrap=True)
        sys.stdout.flush()


def _between(low: str, high: str, share: float) -> str:
    """The colour at `share` of the way from one hex colour to another."""
    channels = (
        round(int(a, 16) + share * (int(b, 16) - int(a, 16)))
        for a, b in ((low[i : i + 2], high[i : i + 2]) for i in (1, 3, 5))
    )
    return "#" + "".join(f"{channel:02x}" for channel in channels)
