"""Byte-level sampling as a Decoder: one model, an ensemble, or a proxy-tuned model.

Every step draws one byte for every active row, from the 257-vectors of one forward call a model.
"""

from __future__ import annotations

import codecs
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmsmith.decoding.events import Decoder, Event, Request, Sampling, Trace
from lmsmith.decoding.sampling import check_sampling, generator_for, sample
from lmsmith.decoding.stop import StopStrings
from lmsmith.errors import CapabilityError, UsageError
from lmsmith.methods.byte_sampler import combine
from lmsmith.methods.byte_sampler.config import ByteSamplerConfig
from lmsmith.methods.byte_sampler.continuation import ContinuationDecoder
from lmsmith.methods.byte_sampler.prompts import parts_of, pending_bytes
from lmsmith.methods.byte_sampler.reader import STOP, ByteReader, normalise

if TYPE_CHECKING:
    from lmsmith.models.lm import LM


def make(models: Sequence[LM], config: ByteSamplerConfig | None = None) -> Decoder:
    """The decoder of a configuration.

    Args:
        models: One model; several for an ensemble; base, expert and antiexpert for proxy tuning.
        config: Settings; the defaults are those of the official code.

    Raises:
        CapabilityError: A tokenizer cannot be read as bytes, or the number of models does not fit.
    """
    config = config or ByteSamplerConfig()
    if config.combine == "proxy" and len(models) != 3:
        raise UsageError(
            f"proxy tuning takes BASE+EXPERT+ANTIEXPERT, three models; got {len(models)}"
        )
    if config.mode == "continue":
        if len(models) != 1:
            raise UsageError("mode 'continue' takes one model; use mode 'bytes' for an ensemble")
        return ContinuationDecoder(models[0])
    return ByteDecoder(models, config)


@dataclass
class _Row:
    request: Request
    rows: list[int]  # one a model
    generator: torch.Generator
    stops: StopStrings
    pending: bytes  # bytes of the character that is not complete yet
    trace: Trace
    started: float
    text: codecs.IncrementalDecoder
    held: list[tuple[int, float]] = field(default_factory=list)  # (byte, logprob) not yet shown
    given: int = 0  # bytes of the first character that the prompt gave
    made: int = 0


class ByteDecoder:
    """Draws bytes from one model or several.

    A row's `max_tokens` counts bytes. `Event.ids` are byte values; `Event.info` has `signal` (the
    probability of the least likely byte of the piece), `branches` (live nodes of the covering
    tree) and `invalid` (mass of continuations that the byte chain rule leaves out, which bytes
    that cannot continue a UTF-8 text hold).
    """

    def __init__(self, models: Sequence[LM], config: ByteSamplerConfig | None = None) -> None:
        self.config = config or ByteSamplerConfig()
        tokens = Sampling(
            temperature=self.config.token_temperature,
            top_k=self.config.token_top_k,
            top_p=self.config.token_top_p,
        )
        self.readers = [
            ByteReader(
                lm,
                filtered=self.config.leaves == "filtered",
                token_sampling=None if tokens == Sampling() else tokens,
            )
            for lm in models
        ]
        self._rows: dict[int, _Row] = {}
        self._next = 0

    @property
    def active(self) -> int:
        """Number of rows still at work."""
        return len(self._rows)

    def admit(self, request: Request) -> int:
        """Take a request in; the prompt is read at the next step, with all other rows.

        Raises:
            UsageError: The prompt is empty, not UTF-8, or longer than a model's context.
        """
        check_sampling(request.sampling)
        rows: list[int] = []
        pending = b""
        try:
            for reader in self.readers:
                parts, start = parts_of(reader, request.prompt)
                rows.append(reader.open(parts, start))
                pending = pending_bytes(parts)
        except Exception:
            for reader, row in zip(self.readers, rows, strict=False):
                reader.close(row)
            raise
        text = codecs.getincrementaldecoder("utf-8")(errors="replace")
        text.decode(pending)
        trace = Trace(prompt_tokens=len(self.readers[0].tree(rows[0]).trunk))
        self._rows[self._next] = _Row(
            request,
            rows,
            generator_for(request.sampling),
            StopStrings(request.stop),
            pending,
            trace,
            time.perf_counter(),
            text,
            given=len(pending),
        )
        self._next += 1
        return self._next - 1

    def step(self) -> list[Event]:
        """Draw one byte for every active row."""
        if not self._rows:
            return []
        rows = list(self._rows.values())
        distributions = self._distributions(rows)
        allowed = torch.stack([_allowed(row.pending, row.request.ignore_eos) for row in rows])
        lost = distributions.exp().masked_fill(allowed, 0.0).sum(-1)  # [rows]
        drawn = sample(
            distributions.masked_fill(~allowed, -math.inf),
            [row.request.sampling for row in rows],
            [row.generator for row in rows],
        )
        events: list[Event] = []
        for (key, row), byte, logprob, invalid in zip(
            list(self._rows.items()),
            drawn.ids.tolist(),
            drawn.logprobs.tolist(),
            lost.tolist(),
            strict=True,
        ):
            row.trace.forward_passes += 1
            event = self._take(key, row, byte, logprob, invalid)
            if event is not None:
                events.append(event)
        return events

    def retire(self, row: int) -> Event | None:
        """Cancel a row that is still active and free its cache; its last event, if it was."""
        if row not in self._rows:
            return None
        return self._finish(row, self._rows[row], "cancelled", row_text=self._rows[row].stops.flush())

    def _distributions(self, rows: list[_Row]) -> Tensor:
        """The combined next-byte distributions  # [rows, 257]."""
        each = torch.stack(
            [
                normalise(reader.next_bytes([row.rows[index] for row in rows]))
                for index, reader in enumerate(self.readers)
            ]
        )  # [models, rows, 257]
        if self.config.combine == "proxy":
            return combine.proxy(each[0], each[1], each[2], self.config.alpha)
        if self.config.combine == "product":
            return combine.product(each, self.config.power)
        return combine.mix(each)

    def _take(
        self, key: int, row: _Row, byte: int, logprob: float, invalid: float
    ) -> Event | None:
        if byte == STOP:
            return self._finish(key, row, "stop", row.stops.flush())
        for reader, number in zip(self.readers, row.rows, strict=True):
            reader.push(number, bytes([byte]))
        row.made += 1
        row.held.append((byte, logprob))
        character = row.text.decode(bytes([byte]))
        row.pending = b"" if character else row.pending + bytes([byte])
        shown, stopped = row.stops.push(character)
        if stopped:
            return self._finish(key, row, "stop", shown)
        if row.made >= row.request.max_tokens:
            return self._finish(key, row, "length", shown + row.stops.flush())
        if self._full(row):
            return self._finish(key, row, "length", shown + row.stops.flush())
        return self._event(key, row, shown, invalid) if shown else None

    def _full(self, row: _Row) -> bool:
        return any(
            len(tree.trunk) + len(tree.live_nodes()) + 2 >= reader.lm.context
            for reader, number in zip(self.readers, row.rows, strict=True)
            for tree in (reader.tree(number),)
        )

    def _event(self, key: int, row: _Row, text: str, invalid: float = 0.0) -> Event:
        if text and not row.trace.first_seconds:
            row.trace.first_seconds = time.perf_counter() - row.started
        size = len(text.encode())
        if text:  # the first character may have bytes that the prompt gave
            size, row.given = size - row.given, 0
        part, row.held = row.held[:size], row.held[size:]
        info: dict[str, Any] = {
            "signal": math.exp(min((logprob for _, logprob in part), default=0.0)),
            "branches": len(self.readers[0].tree(row.rows[0]).live_nodes()),
            "invalid": invalid,
        }
        return Event(
            key,
            text,
            tuple(byte for byte, _ in part),
            tuple(logprob for _, logprob in part),
            info,
        )

    def _finish(self, key: int, row: _Row, reason: str, row_text: str) -> Event:
        event = self._event(key, row, row_text)
        trace = row.trace
        trace.finish_reason = reason
        trace.seconds = time.perf_counter() - row.started
        tree, reader = self.readers[0].tree(row.rows[0]), self.readers[0]
        trace.tokens_kept = max(len(tree.trunk) - trace.prompt_tokens, 0)
        trace.tokens_discarded = reader.discarded(row.rows[0])
        trace.notes["bytes"] = row.made
        for each, number in zip(self.readers, row.rows, strict=True):
            each.close(number)
        del self._rows[key]
        return Event(key, event.text, event.ids, event.logprobs, event.info, trace)


@lru_cache(maxsize=4096)
def _allowed(pending: bytes, ignore_eos: bool) -> Tensor:
    """Which of 257 entries may follow: bytes that continue UTF-8, `stop` between characters."""
    allowed = torch.zeros(STOP + 1, dtype=torch.bool)
    for byte in range(256):
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            decoder.decode(pending + bytes([byte]))
            allowed[byte] = True
        except UnicodeDecodeError:
            pass
    allowed[STOP] = not pending and not ignore_eos
    return allowed
