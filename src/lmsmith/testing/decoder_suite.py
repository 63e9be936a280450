"""The Decoder contract as a test that any decoder can be put through.

    def test_contract():
        requests = [Request(text, sampling=Sampling(seed=1)) for text in ("one", "and two")]
        check_decoder(lambda: MyDecoder(tiny_lm()), requests)

Not for: whether a decoder's text is the right one; that needs an oracle of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from lmsmith.decoding.events import Decoder, Event, Request, Trace

FINISH_REASONS = ("stop", "length", "cancelled")


@dataclass
class Outcome:
    """What one request's row said, event by event."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    trace: Trace | None = None

    def take(self, event: Event) -> None:
        """Add an event; none may follow the one that carries the trace."""
        assert self.trace is None, f"row {event.row} spoke after its last event"
        assert len(event.ids) == len(event.logprobs), "an id without a log-probability"
        self.text += event.text
        self.ids += event.ids
        self.logprobs += event.logprobs
        self.trace = event.trace


def check_decoder(
    make: Callable[[], Decoder],
    requests: Sequence[Request],
    *,
    held: Callable[[Decoder], int] | None = None,
    tolerance: float = 1e-3,
) -> list[Outcome]:
    """Assert that a decoder keeps the contract.

    Held to: a row's output does not depend on its neighbours, on when it joins, or on a neighbour
    being retired; a row's last event, and no other, carries the trace; text is never retracted;
    a row that ended or was retired is gone at once, and so is its cache; what a retired row gave
    is the beginning of what it gives alone.

    Args:
        make: Makes a fresh decoder without rows.
        requests: At least two, greedy or with seeds, the longest of four steps or more.
        held: How many cached rows a decoder holds; by default the rows of its `session` or
            `sessions`.
        tolerance: Allowed difference of log-probabilities between batches, in nats.

    Returns:
        What each request gave when it ran alone, for further checks.

    Raises:
        AssertionError: The contract is broken, or the requests could not show it.
    """
    assert len(requests) >= 2, "two requests are needed to see whether rows meddle"
    for request in requests:
        drawn = request.sampling.temperature > 0
        assert not drawn or request.sampling.seed is not None, f"give a seed: {request}"
    count_held = held or _session_rows

    alone: list[Outcome] = []
    steps = []
    for request in requests:
        outcomes, taken = _run(make(), [request], count_held, joins=[0])
        alone.append(outcomes[0])
        steps.append(taken)
    longest = max(range(len(requests)), key=steps.__getitem__)
    assert steps[longest] >= 4, f"the longest request ended in {steps[longest]} steps; give more"
    for outcome in alone:
        _check_trace(outcome)

    everyone = range(len(requests))
    schedules = {
        "together": [0] * len(requests),
        "joining one a step": list(everyone),
        "joining in reverse": [2 * place for place in reversed(everyone)],
    }
    for name, joins in schedules.items():
        outcomes, _ = _run(make(), requests, count_held, joins)
        for place in everyone:
            _same(outcomes[place], alone[place], f"request {place}, {name}", tolerance)

    for moment in (1, 3):
        outcomes, _ = _run(
            make(), requests, count_held, [0] * len(requests), retire={longest: moment}
        )
        for place in everyone:
            where = f"request {place}, a neighbour retired at step {moment}"
            if place != longest:
                _same(outcomes[place], alone[place], where, tolerance)
                continue
            _same_beginning(outcomes[place], alone[place], where, tolerance)
    return alone


def _run(
    decoder: Decoder,
    requests: Sequence[Request],
    held: Callable[[Decoder], int],
    joins: Sequence[int],
    retire: dict[int, int] | None = None,
) -> tuple[list[Outcome], int]:
    """Run requests that join, or are retired, at given steps; the outcomes and steps taken."""
    outcomes = [Outcome() for _ in requests]
    place: dict[int, int] = {}
    seen: set[int] = set()
    now = 0
    while len(seen) < len(requests) or place:
        for index, join in enumerate(joins):
            if join == now:
                row = decoder.admit(requests[index])
                assert row not in seen, f"row {row} was given out twice"
                seen.add(row)
                place[row] = index
                assert decoder.active == len(place), "`active` does not count an admitted row"
        for row, index in list(place.items()):
            if retire and retire.get(index) == now:
                before = held(decoder)
                last = decoder.retire(row)
                assert last is not None and last.row == row, "retire gave no last event"
                assert last.trace is not None, "the last event of a retired row has no trace"
                assert last.trace.finish_reason == "cancelled", last.trace.finish_reason
                outcomes[index].take(last)
                del place[row]
                assert held(decoder) < before, "retire did not free the row's cache"
                assert decoder.retire(row) is None, "a row was retired twice"
        for event in decoder.step():
            assert event.row in place, f"event of row {event.row}, which is not at work"
            outcomes[place[event.row]].take(event)
            if event.trace is not None:
                del place[event.row]
                assert decoder.retire(event.row) is None, "a row that ended was still there"
        assert decoder.active == len(place), "`active` counts rows that have ended, or misses some"
        now += 1
        assert now < 100_000, "the decoder does not come to an end"
    assert held(decoder) == 0, "rows that ended left caches behind"
    assert decoder.step() == [], "a decoder without rows has events"
    return outcomes, now


def _check_trace(outcome: Outcome) -> None:
    trace = outcome.trace
    assert trace is not None, "a row ended without a trace"
    assert trace.finish_reason in FINISH_REASONS, f"finish reason {trace.finish_reason!r}"
    assert 0 <= trace.first_seconds <= trace.seconds, "the first text came after the end"
    assert trace.tokens_kept >= 0 and trace.tokens_discarded >= 0
    assert trace.prompt_tokens > 0 or not outcome.ids, "prompt tokens are not counted"
    assert trace.forward_passes > 0 or not outcome.ids, "forward passes are not counted"
    for logprob in outcome.logprobs:
        assert logprob <= 1e-4 and not math.isnan(logprob), f"log-probability {logprob}"


def _same(got: Outcome, wanted: Outcome, where: str, tolerance: float) -> None:
    assert got.ids == wanted.ids, f"{where}: other ids than alone: {got.ids} and {wanted.ids}"
    assert got.text == wanted.text, f"{where}: other text than alone"
    assert got.trace is not None and wanted.trace is not None
    assert got.trace.finish_reason == wanted.trace.finish_reason, f"{where}: other end than alone"
    _near(got.logprobs, wanted.logprobs, where, tolerance)


def _same_beginning(got: Outcome, wanted: Outcome, where: str, tolerance: float) -> None:
    """A row that was retired gave the beginning of what it gives when it is left alone."""
    assert wanted.text.startswith(got.text), f"{where}: text retracted"
    beginning = wanted.ids[: len(got.ids)]
    assert got.ids == beginning, f"{where}: other ids than alone: {got.ids} and {beginning}"
    _near(got.logprobs, wanted.logprobs[: len(got.ids)], where, tolerance)


def _near(got: Sequence[float], wanted: Sequence[float], where: str, tolerance: float) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert abs(one - other) <= tolerance, f"{where}: other log-probabilities than alone"


def _session_rows(decoder: Decoder) -> int:
    sessions: Collection = getattr(decoder, "sessions", None) or [decoder.session]  # type: ignore[attr-defined]
    return sum(len(session.rows) for session in sessions)
