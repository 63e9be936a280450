"""The conformance suite catches the faults that it is there for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lmsmith.decoding.events import Request, Sampling
from lmsmith.decoding.generate import complete
from lmsmith.decoding.plain import PlainDecoder
from lmsmith.testing import tiny_lm
from lmsmith.testing.decoder_suite import check_decoder

REQUESTS = [
    Request("The", 8, Sampling(seed=1), ignore_eos=True),
    Request("def token", 5, Sampling(seed=2), ignore_eos=True),
    Request("a", 3, Sampling(temperature=0), ignore_eos=True),
]


@pytest.fixture(scope="module")
def lm():
    return tiny_lm()


class SharedGenerator(PlainDecoder):
    """All rows draw from one stream of random numbers."""

    def __init__(self, lm):
        super().__init__(lm)
        self.generator = torch.Generator().manual_seed(0)

    def admit(self, request):
        row = super().admit(request)
        self._rows[row].generator = self.generator
        return row


class Leaking(PlainDecoder):
    """Rows that end keep their caches."""

    def _drop(self, row):
        del self._rows[row]


class KeptWhenRetired(PlainDecoder):
    """Retired rows keep their caches; the others do not."""

    def retire(self, row):
        if row not in self._rows:
            return None
        event = self._rows.pop(row).output.end("cancelled")
        self.session.fork(row)
        return event


class WithoutTrace(PlainDecoder):
    """The last event does not say that it is the last."""

    def step(self):
        return [replace(event, trace=None) for event in super().step()]


class TwoTraces(PlainDecoder):
    """The last event comes twice."""

    def step(self):
        return [one for event in super().step() for one in [event] * (1 + bool(event.trace))]


class Retracting(PlainDecoder):
    """Cancelling takes text back by claiming other text."""

    def retire(self, row):
        event = super().retire(row)
        return event and replace(event, text="\0")


class OtherIds(PlainDecoder):
    """Cancelling adds a token that was never drawn."""

    def retire(self, row):
        event = super().retire(row)
        return event and replace(event, ids=(*event.ids, 3), logprobs=(*event.logprobs, -1.0))


class OtherLogprobs(PlainDecoder):
    """Cancelling gives the ids that are still held back, under wrong log-probabilities."""

    def retire(self, row):
        if row in self._rows:
            # As if the next token had been drawn and its text were not certain yet.
            output = self._rows[row].output
            output._ids.append(self.ahead[row][output.count])
            output._logprobs.append(-50.0)
        return super().retire(row)

    def admit(self, request):
        row = super().admit(request)
        self.ahead = getattr(self, "ahead", {})
        self.ahead[row] = [*complete(PlainDecoder(self.lm), [request])[0].ids, 0]
        return row


class Swapping(PlainDecoder):
    """Rows that join while others run get one another's tokens."""

    def _logits(self, rows, states):
        logits = super()._logits(rows, states)
        return logits.flip(0) if len(rows) > 1 and not states[0].fresh else logits


class Idle(PlainDecoder):
    """Counts rows that have ended as active."""

    @property
    def active(self):
        return max(1, super().active)


def test_a_sound_decoder_passes(lm):
    outcomes = check_decoder(lambda: PlainDecoder(lm), REQUESTS)
    assert [len(outcome.ids) for outcome in outcomes] == [8, 5, 3]


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (SharedGenerator, "other ids than alone"),
        (Leaking, "caches"),
        (KeptWhenRetired, "retire did not free"),
        (WithoutTrace, "active"),
        (TwoTraces, "not at work"),
        (Retracting, "text retracted"),
        (OtherIds, "retired at step 1: other ids than alone"),
        (OtherLogprobs, "retired at step 1: other log-probabilities than alone"),
        (Swapping, "other ids than alone"),
        (Idle, "active"),
    ],
)
def test_a_broken_decoder_fails(lm, broken, says):
    with pytest.raises(AssertionError, match=says):
        check_decoder(lambda: broken(lm), REQUESTS)


def test_requests_that_cannot_show_anything_are_refused(lm):
    def make():
        return PlainDecoder(lm)

    with pytest.raises(AssertionError, match="two requests"):
        check_decoder(make, REQUESTS[:1])
    with pytest.raises(AssertionError, match="give a seed"):
        check_decoder(make, [REQUESTS[0], Request("a")])
    with pytest.raises(AssertionError, match="give more"):
        check_decoder(make, [REQUESTS[2], REQUESTS[2]])
