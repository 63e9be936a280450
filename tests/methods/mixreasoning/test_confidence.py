"""Token confidence against its definition, Prop. C.1 and closed forms."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmsmith.methods.mixreasoning import confidence
from lmsmith.methods.mixreasoning.confidence import SIGNALS, certainty, token_confidence

PROBABILITIES = st.lists(st.floats(1e-6, 1.0), min_size=6, max_size=40)


def logits_of(weights):
    values = torch.tensor(weights, dtype=torch.float64)
    return (values / values.sum()).log()


@pytest.mark.parametrize("k", [1, 2, 5, 20])
def test_uniform_over_k_is_log_k(k):
    logits = torch.full((50,), -math.inf, dtype=torch.float64)
    logits[:k] = 0.0
    assert token_confidence(logits, k).item() == pytest.approx(math.log(k), abs=1e-12)


@given(PROBABILITIES, st.integers(1, 6))
def test_identity_with_mass_and_divergence_from_uniform(weights, k):
    """Prop. C.1: c = log(k / s) + KL(U || q~)."""
    logits = logits_of(weights)
    top = logits.exp().topk(k).values
    s = top.sum()
    divergence = (torch.log(1 / k / (top / s)) / k).sum()
    assert float(token_confidence(logits, k) - (math.log(k) - s.log() + divergence)) == (
        pytest.approx(0.0, abs=1e-10)
    )


@given(st.floats(0.01, 1.0), st.floats(0.0, 0.999))
def test_closed_form_of_two(s, delta):
    """For q = (s/2)(1 +- delta): c = log(2/s) + log(1/(1 - delta^2)) / 2."""
    rest = (1 - s) / 10_000
    top = [s / 2 * (1 + delta), s / 2 * (1 - delta)]
    if rest >= top[1]:
        return
    logits = torch.tensor([*top, *[rest] * 10_000], dtype=torch.float64).log()
    wanted = math.log(2 / s) + 0.5 * math.log(1 / (1 - delta**2))
    assert token_confidence(logits, 2).item() == pytest.approx(wanted, abs=1e-9)


@given(PROBABILITIES, st.integers(0, 4), st.integers(0, 4), st.floats(0.0, 0.5))
def test_a_robin_hood_transfer_never_raises_it(weights, i, j, share):
    values = torch.tensor(sorted(weights, reverse=True), dtype=torch.float64)
    values /= values.sum()
    k = 5
    before = token_confidence(values.log(), k)
    rich, poor = min(i, j), max(i, j)
    amount = share * (values[rich] - values[poor])
    values[rich] -= amount
    values[poor] += amount
    assert float(token_confidence(values.log(), k)) <= float(before) + 1e-12


@given(PROBABILITIES, st.floats(-50, 50), st.randoms())
def test_shifts_and_order_of_the_vocabulary_do_not_matter(weights, shift, rng):
    logits = logits_of(weights)
    order = list(range(len(weights)))
    rng.shuffle(order)
    other = logits[order] + shift
    for name, signal in SIGNALS.items():
        assert float(signal(other, 5)) == pytest.approx(float(signal(logits, 5)), abs=1e-9), name


@settings(max_examples=50)
@given(PROBABILITIES)
def test_other_signals_against_their_definitions(weights):
    p = sorted(logits_of(weights).exp().tolist(), reverse=True)
    logits = logits_of(weights)
    q = [value / sum(p[:5]) for value in p[:5]]
    entropy = -sum(value * math.log(value) for value in q)
    whole = -sum(value * math.log(value) for value in p)
    near = pytest.approx
    assert float(confidence.max_probability(logits)) == near(p[0], abs=1e-12)
    assert float(confidence.margin(logits)) == near(p[0] - p[1], abs=1e-12)
    assert float(confidence.negative_entropy(logits, 5)) == near(-entropy, abs=1e-10)
    assert float(certainty(logits, 5)) == near(1 - entropy / math.log(5), abs=1e-10)
    assert float(certainty(logits, 5, "vocabulary")) == near(1 - whole / math.log(len(p)), abs=1e-9)


def test_high_is_sure():
    sure, unsure = torch.zeros(2, 100)
    sure[3] = 20.0
    for name, signal in SIGNALS.items():
        assert signal(sure) > signal(unsure), name
    assert certainty(sure) > certainty(unsure)
    assert certainty(unsure).item() == pytest.approx(0.0, abs=1e-6)


def test_half_precision_stays_finite_and_a_batch_is_its_rows():
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(0)) * 30
    assert token_confidence(logits.bfloat16()).isfinite().all()
    together = token_confidence(logits, 7)
    assert together.shape == (3,)
    for row in range(3):
        assert together[row] == token_confidence(logits[row], 7)


def test_a_vocabulary_smaller_than_k_and_impossible_tokens():
    logits = torch.tensor([0.0, 0.0, -math.inf])
    assert token_confidence(logits[:2], 20).item() == pytest.approx(math.log(2))
    assert certainty(logits, 3).isfinite()
