"""Plain autoregressive decoding: one token a row and step, all rows in one forward pass.

Not for: anything that drafts, rolls back or reads more than the next-token law.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lmsmith.decoding.events import Event, Request, Sampling
from lmsmith.decoding.rows import RowOutput
from lmsmith.decoding.sampling import generator_for, sample
from lmsmith.decoding.text import TokenText
from lmsmith.errors import UsageError

if TYPE_CHECKING:
    from lmsmith.models import LM

PREFILL_TOKENS = 4096
"""Most prompt tokens in one forward pass over all rows; longer prompts go in pieces."""


@dataclass
class _Row:
    output: RowOutput
    pending: list[int]  # tokens not yet fed: the prompt, then always the newest token
    sampling: Sampling
    generator: torch.Generator
    fresh: bool = True


class PlainDecoder:
    """A `Decoder` that draws each token from the model's own law.

    Attributes:
        lm: The model.
        session: The Session that the rows live in; a row has the same id here and there.
    """

    def __init__(self, lm: LM) -> None:
        self.lm = lm
        self.session = lm.session()
        self._texts = TokenText(lm.tokenizer)
        self._rows: dict[int, _Row] = {}

    @property
    def active(self) -> int:
        """Number of rows still at work."""
        return len(self._rows)

    def admit(self, request: Request) -> int:
        """Take a request in; its prompt is computed with the next step.

        Raises:
            UsageError: A prompt that cannot be used, or a setting out of range. Nothing has
                changed then.
        """
        ids = self.lm.prompt_ids(request.prompt)
        room = self.lm.context - len(ids)
        row = self.session.add()
        try:
            output = RowOutput(row, request, self._texts, self.lm.eos_ids, len(ids), room)
        except UsageError:
            self.session.free(row)
            raise
        self._rows[row] = _Row(output, ids, request.sampling, generator_for(request.sampling))
        return row

    def adopt(
        self,
        row: int,
        output: RowOutput,
        first: int,
        logprob: float,
        sampling: Sampling,
        generator: torch.Generator,
        info: Mapping[str, Any] | None = None,
    ) -> Event | None:
        """Go on from a row that another decoder has begun in this decoder's session.

        Args:
            row: The row's id, here and in the session, whose cache holds all but `first`.
            output: Its output so far.
            first: The newest token, drawn but not yet fed.
            logprob: Its log-probability in nats.
            sampling: How to draw the others.
            generator: The row's own.
            info: What the other decoder knows; goes out with the next Event.

        Returns:
            An Event if `first` gave text or ended the row.
        """
        self._rows[row] = _Row(output, [first], sampling, generator, fresh=False)
        event = output.push((first,), (logprob,), info)
        if event is not None and event.trace is not None:
            self._drop(row)
        return event

    def step(self) -> list[Event]:
        """Advance every active row by one token.

        New rows have their prompts computed together, in a forward pass of their own, so that rows
        at work are not padded to the length of a prompt.
        """
        events: list[Event] = []
        fresh: list[int] = []
        going: list[int] = []
        for row, state in list(self._rows.items()):
            if state.output.limit == 0:
                events.append(state.output.end("length"))
                self._drop(row)
            else:
                (fresh if state.fresh else going).append(row)
        for rows in (fresh, going):
            if rows:
                events += self._advance(rows)
        return events

    def retire(self, row: int) -> Event | None:
        """Cancel a row and free its cache; its last Event, or `None` if it had ended."""
        if row not in self._rows:
            return None
        event = self._rows[row].output.end("cancelled")
        self._drop(row)
        return event

    def _drop(self, row: int) -> None:
        del self._rows[row]
        self.session.free(row)

    def _advance(self, rows: Sequence[int]) -> list[Event]:
        states = [self._rows[row] for row in rows]
        drawn = sample(
            self._logits(rows, states),
            [state.sampling for state in states],
            [state.generator for state in states],
        )
        events = []
        for row, state, one, logprob in zip(
            rows, states, drawn.ids.tolist(), drawn.logprobs.tolist(), strict=True
        ):
            state.pending, state.fresh = [one], False
            event = state.output.push((one,), (logprob,))
            if event is not None:
                events.append(event)
                if event.trace is not None:
                    self._drop(row)
        return events

    def _logits(self, rows: Sequence[int], states: Sequence[_Row]) -> torch.Tensor:
        """Feed what is pending, in pieces if it is much; logits after each row's last token."""
        longest = max(len(state.pending) for state in states)
        width = max(1, PREFILL_TOKENS // len(rows))
        last: dict[int, torch.Tensor] = {}
        for start in range(0, longest, width):
            piece = {
                row: state.pending[start : start + width]
                for row, state in zip(rows, states, strict=True)
                if len(state.pending) > start
            }
            step = self.session.feed(piece)
            for row in piece:
                self._rows[row].output.trace.forward_passes += 1
            if longest <= width:
                return step.logits
            done = [row for row in piece if len(self._rows[row].pending) <= start + width]
            last |= zip(done, step.logits_at([(row, -1) for row in done]), strict=True)
        return torch.stack([last[row] for row in rows])
