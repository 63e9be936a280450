"""Stop strings, found across chunk borders while a row's text streams.

Not for: end tokens, which are ids (`lmsmith.decoding.rows`).
"""

from __future__ import annotations

from collections.abc import Iterable

from lmsmith.errors import UsageError


class StopStrings:
    """Lets text through up to the first stop string.

    The match that ends earliest wins, the longest where two end together: what is let through does
    not depend on how the text was cut into chunks. Text that may be the beginning of a stop string
    is held back until that is decided, so nothing let through is ever taken back.

    Attributes:
        found: The stop string that ended the text, or `None`.

    Raises:
        UsageError: A stop string is empty.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        # Longest first: of matches that end together the longest begins first.
        self._stops = sorted(set(stops), key=len, reverse=True)
        if "" in self._stops:
            raise UsageError("a stop string is empty; give at least one character, or none at all")
        self._longest = len(self._stops[0]) if self._stops else 0
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Take in new text and return what may be shown; nothing once a stop string is found."""
        if not self._stops:
            return text
        if self.found is not None:
            return ""
        text = self._held + text
        end = len(text) + 1
        for stop in self._stops:
            at = text.find(stop, 0, end)
            if at >= 0 and at + len(stop) < end:
                end, self.found = at + len(stop), stop
        if self.found is not None:
            self._held = ""
            return text[: end - len(self.found)]
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                self._held = tail
                return text[:-length]
        self._held = ""
        return text

    def flush(self) -> str:
        """The text still held back; the row has ended for another reason."""
        held, self._held = self._held, ""
        return held
