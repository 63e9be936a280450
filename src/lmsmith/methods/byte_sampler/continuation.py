"""One-shot continuation: a token that covers the end of the prompt, then ordinary tokens.

The byte-level part costs one forward call; after it a row decodes at the speed of plain decoding,
on the same cache (official code, `generate_pbp_batched`).
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lmsmith.decoding.events import Event, Request
from lmsmith.decoding.plain import PlainDecoder
from lmsmith.decoding.rows import RowOutput
from lmsmith.decoding.sampling import generator_for, sample
from lmsmith.methods.byte_sampler.prompts import parts_of, pending_bytes
from lmsmith.methods.byte_sampler.reader import ByteReader

if TYPE_CHECKING:
    from lmsmith.models.lm import LM
    from lmsmith.models.session import Session


@dataclass
class _Waiting:
    request: Request
    output: RowOutput
    text: _SpelledText


class ContinuationDecoder:
    """Draws one covering leaf a row, then hands the row to plain decoding.

    The leaf is drawn by its probability among all valid tokens that cover the end of the prompt,
    under the request's sampling; its log-probability is that of the leaf among the leaves.
    """

    def __init__(self, lm: LM) -> None:
        self.plain = PlainDecoder(lm)
        self.reader = ByteReader(lm, session=self.plain.session)
        self._waiting: dict[int, _Waiting] = {}

    @property
    def active(self) -> int:
        """Number of rows still at work."""
        return self.plain.active + len(self._waiting)

    @property
    def session(self) -> Session:
        """The session of the byte-level part and of plain decoding alike."""
        return self.plain.session

    def admit(self, request: Request) -> int:
        """Take a request in; its covering tree is read at the next step.

        Raises:
            UsageError: The prompt is empty, not UTF-8, or longer than the model's context.
        """
        parts, start = parts_of(self.reader, request.prompt)
        row = self.reader.open(parts, start)
        text = _SpelledText(self.reader, pending_bytes(parts))
        trunk = len(self.reader.tree(row).trunk)
        lm = self.reader.lm
        try:
            output = RowOutput(row, request, text, lm.eos_ids, trunk, lm.context - trunk)
        except Exception:
            self.reader.close(row)
            raise
        self._waiting[row] = _Waiting(request, output, text)
        return row

    def step(self) -> list[Event]:
        """Draw the covering leaf of new rows; advance all others by one token."""
        events = self.plain.step() if self.plain.active else []
        waiting, self._waiting = self._waiting, {}
        if waiting:
            self.reader.refresh(list(waiting))
        for row, state in waiting.items():
            if state.output.limit == 0:
                self.reader.close(row)
                events.append(state.output.end("length"))
                continue
            event = self._cover(row, state)
            if event is not None:
                events.append(event)
        return events

    def retire(self, row: int) -> Event | None:
        """Cancel a row and free its cache; its last event, or `None` if it had ended."""
        state = self._waiting.pop(row, None)
        if state is None:
            return self.plain.retire(row)
        self.reader.close(row)
        return state.output.end("cancelled")

    def _cover(self, row: int, state: _Waiting) -> Event | None:
        leaves = self.reader.cover(row)
        generator = generator_for(state.request.sampling)
        logits = torch.tensor([[logprob for _, _, logprob in leaves]])
        drawn = sample(logits, state.request.sampling, [generator])
        node, token, _ = leaves[int(drawn.ids[0])]
        state.text.skip = self.reader.tree(row).pushed - node.end
        self.reader.settle_on(row, node)
        # The branch to the leaf has joined the trunk, and takes room that was counted as free.
        room = self.reader.lm.context - self.session.length(row)
        state.output.limit = min(state.output.limit, room)
        state.output.trace.forward_passes += 1
        return self.plain.adopt(
            row,
            state.output,
            token,
            float(drawn.logprobs[0]),
            state.request.sampling,
            generator,
            {"covering leaves": len(leaves)},
        )


class _SpelledText:
    """Text of tokens by their bytes, without the bytes that the prompt has already."""

    def __init__(self, reader: ByteReader, pending: bytes) -> None:
        self._reader = reader
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._utf8.decode(pending)
        self.skip = 0

    def stream(self) -> _SpelledText:
        return self

    def push(self, item: int) -> str:
        tokens = self._reader.tokens
        data = tokens.spelling[item] if item < len(tokens.spelling) else None
        if data is None:
            data = b"" if item in tokens.special_ids else tokens.added.get(item, b"")
        data, self.skip = data[self.skip :], 0
        return self._utf8.decode(data)

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)
