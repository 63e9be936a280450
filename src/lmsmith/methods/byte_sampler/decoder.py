"""Byte-level sampling as a Decoder: one model, an ensemble, or a proxy-tuned model.

Every step draws one byte for every active row, from the 257-vectors of one forward call a model.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmsmith.decoding.events import Decoder, Event, Request, Sampling
from lmsmith.decoding.rows import RowOutput
from lmsmith.decoding.sampling import generator_for, sample
from lmsmith.decoding.text import ByteText, TextStream
from lmsmith.errors import UsageError
from lmsmith.methods.byte_sampler import combine
from lmsmith.methods.byte_sampler.buckets import STOP
from lmsmith.methods.byte_sampler.config import ByteSamplerConfig
from lmsmith.methods.byte_sampler.continuation import ContinuationDecoder
from lmsmith.methods.byte_sampler.prompts import is_ids, parts_of, pending_bytes
from lmsmith.methods.byte_sampler.reader import ByteReader, normalise

if TYPE_CHECKING:
    from lmsmith.models.lm import LM
    from lmsmith.models.session import Session


def make(models: Sequence[LM], config: ByteSamplerConfig | None = None) -> Decoder:
    """The decoder of a configuration.

    Args:
        models: One model; several for an ensemble; base, expert and antiexpert for proxy tuning.
        config: Settings; the defaults are those of the official code.

    Raises:
        CapabilityError: A tokenizer cannot be read as bytes.
        UsageError: The number of models does not fit the settings.
    """
    config = config or ByteSamplerConfig()
    if config.mode == "continue":
        if len(models) != 1:
            raise UsageError("mode 'continue' takes one model; use mode 'bytes' for an ensemble")
        return ContinuationDecoder(models[0])
    return ByteDecoder(models, config)


@dataclass
class _Row:
    output: RowOutput
    rows: list[int]  # one a model
    sampling: Sampling
    generator: torch.Generator
    pending: bytes  # bytes of a character that is not complete yet
    endless: bool


class ByteDecoder:
    """Draws bytes from one model or several.

    A row's `max_tokens` counts bytes, and an Event's `ids` are byte values (256 is `stop`). Its
    `info` has `signal` (probability of the last byte), `branches` (live nodes of the first model's
    covering tree) and `invalid`: the share of the mass that was taken out, first with filtered
    leaves that of tokens that are not valid (the largest of the models), then of what is left that
    of bytes that cannot continue a UTF-8 text. A `stop` that the request ignores does not count.

    Attributes:
        config: The settings.
        readers: One a model.

    Raises:
        CapabilityError: A tokenizer cannot be read as bytes.
        UsageError: The number of models does not fit the settings.
    """

    def __init__(self, models: Sequence[LM], config: ByteSamplerConfig | None = None) -> None:
        self.config = config or ByteSamplerConfig()
        if not models:
            raise UsageError("byte-sampler needs a model; got none")
        if self.config.combine == "proxy" and len(models) != 3:
            raise UsageError(
                f"proxy tuning takes three models, BASE+EXPERT+ANTIEXPERT; got {len(models)}"
            )
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

    @property
    def sessions(self) -> list[Session]:
        """The models' sessions."""
        return [reader.session for reader in self.readers]

    def admit(self, request: Request) -> int:
        """Take a request in; the prompt is read at the next step, with all other rows.

        Raises:
            UsageError: The prompt is empty, not UTF-8, or longer than a model's context; a
                setting is out of range. Nothing has changed then.
        """
        first = self.readers[0].tokens
        if is_ids(request.prompt) and any(
            (reader.tokens.spelling, reader.tokens.literals) != (first.spelling, first.literals)
            for reader in self.readers
        ):
            raise UsageError(
                "a prompt of token ids means other text to each model, as their tokenizers differ; "
                "give it as text"
            )
        rows: list[int] = []
        pending = b""
        try:
            for reader in self.readers:
                parts, start = parts_of(reader, request.prompt)
                rows.append(reader.open(parts, start))
                pending = pending_bytes(parts)
            trunk = len(self.readers[0].tree(rows[0]).trunk)
            output = RowOutput(self._next, request, _After(pending), (STOP,), trunk)
        except Exception:
            for reader, row in zip(self.readers, rows, strict=False):
                reader.close(row)
            raise
        self._rows[self._next] = _Row(
            output,
            rows,
            request.sampling,
            generator_for(request.sampling),
            pending,
            request.ignore_eos,
        )
        self._next += 1
        return self._next - 1

    def step(self) -> list[Event]:
        """Draw one byte for every active row."""
        events = [
            self._end(key, "length")
            for key, row in list(self._rows.items())
            if row.output.limit == 0 or self._full(row)
        ]
        if not self._rows:
            return events
        rows = list(self._rows.items())
        allowed = torch.stack([_allowed(row.pending, row.endless) for _, row in rows])
        distributions = self._distributions([row for _, row in rows], allowed)
        lost = distributions.exp().masked_fill(allowed, 0.0)[:, :STOP].sum(-1).tolist()
        drawn = sample(
            distributions.masked_fill(~allowed, -math.inf),
            [row.sampling for _, row in rows],
            [row.generator for _, row in rows],
        )
        for (key, row), byte, logprob, mass in zip(
            rows, drawn.ids.tolist(), drawn.logprobs.tolist(), lost, strict=True
        ):
            row.output.trace.forward_passes += 1
            if byte != STOP:
                self._extend(row, byte)
            info = {
                "signal": math.exp(logprob),
                "branches": len(self.readers[0].tree(row.rows[0]).live_nodes()),
                "invalid": 1 - (1 - mass) * (1 - self._invalid(row)),
            }
            event = row.output.push((byte,), (logprob,), info)
            if event is not None:
                events.append(self._closed(key, event) if event.trace else event)
        return events

    def retire(self, row: int) -> Event | None:
        """Cancel a row and free its cache; its last event, or `None` if it had ended."""
        return self._end(row, "cancelled") if row in self._rows else None

    def _distributions(self, rows: Sequence[_Row], allowed: Tensor) -> Tensor:
        """The combined next-byte distributions, some mass on allowed entries  # [rows, 257]."""
        each = torch.stack(
            [
                normalise(reader.next_bytes([row.rows[index] for row in rows], allowed))
                for index, reader in enumerate(self.readers)
            ]
        )  # [models, rows, 257]
        together, alpha = combine.mix(each), self.config.alpha
        otherwise = together
        if self.config.combine == "proxy":
            together, otherwise = combine.proxy(each[0], each[1], each[2], alpha), each[0]
        elif self.config.combine == "product":
            together = combine.product(each, self.config.power)
        some = (together.isfinite() & allowed).any(dim=-1, keepdim=True)
        return torch.where(some, together, otherwise)

    def _extend(self, row: _Row, byte: int) -> None:
        data = bytes([byte])
        for reader, number in zip(self.readers, row.rows, strict=True):
            reader.push(number, data)
        whole = row.pending + data
        row.pending = b"" if _complete(whole) else whole

    def _invalid(self, row: _Row) -> float:
        return max(
            reader.invalid(number) for reader, number in zip(self.readers, row.rows, strict=True)
        )

    def _full(self, row: _Row) -> bool:
        return any(
            reader.room(number) < 1 for reader, number in zip(self.readers, row.rows, strict=True)
        )

    def _end(self, key: int, reason: str) -> Event:
        return self._closed(key, self._rows[key].output.end(reason))

    def _closed(self, key: int, event: Event) -> Event:
        """Free a row that has ended, and put the model's own counts into its trace."""
        row = self._rows.pop(key)
        trace, reader = row.output.trace, self.readers[0]
        trace.notes["bytes"] = row.output.count
        trace.tokens_kept = len(reader.tree(row.rows[0]).trunk) - trace.prompt_tokens
        trace.tokens_discarded = reader.discarded(row.rows[0])
        for each, number in zip(self.readers, row.rows, strict=True):
            each.close(number)
        return event


@dataclass(frozen=True)
class _After:
    """Text streams that begin inside a character: its first bytes are the prompt's."""

    pending: bytes

    def stream(self) -> TextStream:
        stream = ByteText().stream()
        for byte in self.pending:
            stream.push(byte)
        return stream


def _complete(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@lru_cache(maxsize=4096)
def _allowed(pending: bytes, endless: bool) -> Tensor:
    """Which of 257 entries may follow: bytes that continue UTF-8, `stop` between characters."""
    allowed = torch.zeros(STOP + 1, dtype=torch.bool)
    for byte in range(256):
        try:
            codecs.getincrementaldecoder("utf-8")().decode(pending + bytes([byte]))
        except UnicodeDecodeError:
            continue
        allowed[byte] = True
    allowed[STOP] = not pending and not endless
    return allowed
