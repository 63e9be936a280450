"""What every decoder does for a row: keep its output and see where it ends.

Not for: the next token (`lmsmith.decoding.sampling`) or the forward pass that gives its law.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lmsmith.decoding.checks import check_request
from lmsmith.decoding.events import Event, Request, Trace
from lmsmith.decoding.stop import StopStrings
from lmsmith.decoding.text import TextSource


class RowOutput:
    """One row's output: tokens go in, Events come out, and it says when the row has ended.

    Text that may still change (half a character, the beginning of a stop string) is held back. Ids
    wait for their text, so an Event's ids are those behind it; the end token and the tokens of a
    stop string come with the last Event and have no text.

    Attributes:
        trace: The row's trace; the decoder counts forward passes, discarded tokens and notes here.
        limit: Most tokens the row may have.
        count: Tokens it has.
    """

    def __init__(
        self,
        row: int,
        request: Request,
        texts: TextSource,
        end_ids: Iterable[int] = (),
        prompt_tokens: int = 0,
        room: int | None = None,
    ) -> None:
        """Open a row's output.

        Args:
            row: The row's id.
            request: What was asked for.
            texts: Where text streams come from.
            end_ids: The model's own end tokens; heeded unless the request ignores them.
            prompt_tokens: Length of the prompt in the model's tokens.
            room: New tokens that the model's context has room for.

        Raises:
            UsageError: A setting out of range, or an empty stop string.
        """
        check_request(request)
        stop = (request.stop,) if isinstance(request.stop, str) else request.stop
        self.row = row
        self.limit = request.max_tokens if room is None else min(request.max_tokens, room)
        self.count = 0
        self.trace = Trace(prompt_tokens=prompt_tokens)
        self._end_ids = frozenset(request.stop_ids).union(() if request.ignore_eos else end_ids)
        self._stream = texts.stream()
        self._stops = StopStrings(stop)
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._info: dict[str, Any] = {}
        self._began = time.perf_counter()

    def push(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        info: Mapping[str, Any] | None = None,
    ) -> Event | None:
        """Take in new tokens.

        Args:
            ids: Token ids, or byte values, in order. What follows the row's end is discarded.
            logprobs: Their log-probabilities in nats.
            info: What the method knows here; goes out with the next Event.

        Returns:
            An Event if there is new text or the row has ended: then it carries the trace.
        """
        if info:
            self._info.update(info)
        text, reason = "", ""
        taken = 0
        for one, logprob in zip(ids, logprobs, strict=True):
            taken += 1
            self._ids.append(one)
            self._logprobs.append(logprob)
            if one in self._end_ids:
                reason = "stop"
                break
            text += self._stops.push(self._stream.push(one))
            if self._stops.found is not None:
                reason = "stop"
                break
            if self.count + taken >= self.limit:
                reason = "length"
                break
        self.count += taken
        if reason:
            self.trace.tokens_discarded += len(ids) - taken
            return self.end(reason, text)
        return self._event(text) if text else None

    def end(self, reason: str, text: str = "") -> Event:
        """The row's last Event.

        Args:
            reason: `stop`, `length` or `cancelled`; a stop string in the text still held back
                makes it `stop`.
            text: New text that goes before what was held back.
        """
        text += self._stops.push(self._stream.flush()) + self._stops.flush()
        trace = self.trace
        trace.finish_reason = reason if self._stops.found is None else "stop"
        trace.tokens_kept = self.count
        event = self._event(text, trace)
        trace.seconds = time.perf_counter() - self._began
        trace.first_seconds = trace.first_seconds or trace.seconds
        return event

    def _event(self, text: str, trace: Trace | None = None) -> Event:
        if text and not self.trace.first_seconds:
            self.trace.first_seconds = time.perf_counter() - self._began
        event = Event(self.row, text, tuple(self._ids), tuple(self._logprobs), self._info, trace)
        self._ids, self._logprobs, self._info = [], [], {}
        return event
