"""The upper waist: what is asked of a decoder, and what it says while it works.

Not for: how tokens are chosen (`sampling`) or how models run (`lmsmith.models.session`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = Mapping[str, Any]
Prompt = str | bytes | Sequence[int] | Sequence[Message]


@dataclass(frozen=True)
class Sampling:
    """How the next token (or byte) is drawn.

    Attributes:
        temperature: Divides the logits; 0 is greedy.
        top_k: Keep the k most likely; 0 keeps all.
        top_p: Keep the smallest set whose probability reaches this; 1 keeps all.
        min_p: Drop what is less likely than this share of the most likely; 0 drops nothing.
        seed: Seed of the row's own generator; `None` draws one.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None


@dataclass(frozen=True)
class Request:
    """One row of work for a decoder.

    Attributes:
        prompt: Text, UTF-8 bytes, token ids, or chat messages.
        max_tokens: Most new tokens (a byte decoder counts bytes).
        sampling: How to draw.
        stop: Strings that end the row; they are not part of the text that is yielded.
        stop_ids: Token ids that end the row, besides the model's own end tokens.
        ignore_eos: Go on past the model's end tokens (for timing).
    """

    prompt: Prompt
    max_tokens: int = 128
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass
class Trace:
    """What a finished row cost.

    Attributes:
        prompt_tokens: Tokens of the prompt as the model read it.
        forward_passes: Forward calls in which the row took part.
        tokens_kept: Model tokens behind the text that was yielded.
        tokens_discarded: Model tokens computed and then thrown away.
        seconds: Wall time from admission to the end.
        first_seconds: Wall time from admission to the first text.
        finish_reason: `stop` (end token or stop string), `length`, or `cancelled`.
        notes: Counts of the method's own.
    """

    prompt_tokens: int = 0
    forward_passes: int = 0
    tokens_kept: int = 0
    tokens_discarded: int = 0
    seconds: float = 0.0
    first_seconds: float = 0.0
    finish_reason: str = ""
    notes: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Event:
    """News of one row.

    Attributes:
        row: The row's id, as `admit` returned it.
        text: New text; never retracted once yielded.
        ids: Token ids (or byte values) behind the text.
        logprobs: Log-probability of each id in nats, under the distribution before truncation.
        info: What the method knows here (mode, confidence, accepted length, ...).
        trace: Set on the row's last event only.
    """

    row: int
    text: str = ""
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict)
    trace: Trace | None = None


class Decoder(Protocol):
    """Anything that produces text, as a machine that is stepped.

    A decoder never loops over rows where one forward can serve them, and a row's output does not
    depend on its neighbours.
    """

    def admit(self, request: Request) -> int:
        """Take a request in, at any step, and return its row id."""

    def step(self) -> list[Event]:
        """Advance every active row by one forward pass or one round."""

    def retire(self, row: int) -> Event | None:
        """Cancel a row that is still active and free its cache; its last event, if it was."""

    @property
    def active(self) -> int:
        """Number of rows still at work."""
