"""Sampling against transformers' own warpers, against the law it claims, and row by row."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lmsmith.decoding.checks import check_sampling
from lmsmith.decoding.events import Sampling
from lmsmith.decoding.sampling import (
    draw,
    filtered_probs,
    generator_for,
    sample,
)
from lmsmith.errors import LmsmithError, UsageError

SETTINGS = [
    Sampling(),
    Sampling(temperature=0.6),
    Sampling(temperature=1.7),
    Sampling(top_k=1),
    Sampling(top_k=5),
    Sampling(top_k=10_000),
    Sampling(top_p=0.9),
    Sampling(top_p=0.05),
    Sampling(top_p=0.0),
    Sampling(min_p=0.1),
    Sampling(min_p=1.0),
    Sampling(temperature=0.7, top_k=20, top_p=0.8),
    Sampling(temperature=1.3, top_k=40, top_p=0.95, min_p=0.05),
    Sampling(temperature=0.8, top_p=0.99, min_p=0.01),
    Sampling(temperature=0),
    Sampling(temperature=0, top_k=3, top_p=0.5, min_p=0.2),
]


def transformers_probs(logits, sampling):
    """What transformers would draw from, with its own processors in its own order."""
    if sampling.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature))])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return warpers(None, logits.clone()).softmax(-1)


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
@pytest.mark.parametrize(("width", "spread"), [(257, 2.0), (257, 0.01), (5000, 4.0), (5000, 0.5)])
def test_equals_transformers(sampling, width, spread):
    logits = torch.randn(6, width, generator=torch.Generator().manual_seed(3)) * spread
    expected = transformers_probs(logits, sampling)
    torch.testing.assert_close(filtered_probs(logits, sampling), expected, atol=1e-6, rtol=1e-5)


def test_equals_transformers_with_forbidden_entries():
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(4))
    logits[:, 3:] = -math.inf
    for sampling in SETTINGS:
        expected = transformers_probs(logits, sampling)
        torch.testing.assert_close(filtered_probs(logits, sampling), expected, atol=1e-6, rtol=1e-5)


def test_ties_at_the_top_k_are_all_kept():
    logits = torch.zeros(1, 3000)
    logits[0, :5] = 1.0
    for top_k, kept in ((3, 5), (5, 5), (6, 3000)):
        probs = filtered_probs(logits, Sampling(top_k=top_k))
        assert int((probs > 0).sum()) == kept
        torch.testing.assert_close(probs, transformers_probs(logits, Sampling(top_k=top_k)))


def test_top_p_keeps_the_smallest_set_even_among_ties():
    logits = torch.zeros(2, 4096)
    probs = filtered_probs(logits, Sampling(top_p=0.25))
    assert (probs > 0).sum(-1).tolist() == [1024, 1024]
    assert bool((probs[:, :1024] > 0).all())


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_row_does_not_depend_on_its_neighbours(data):
    """Mixed settings in one batch, with ties everywhere: each row as if it were alone."""
    width = data.draw(st.sampled_from([3, 40, 257, 1500]))
    rows = data.draw(st.integers(1, 6))
    chosen = data.draw(st.lists(st.sampled_from(SETTINGS), min_size=rows, max_size=rows))
    seed = data.draw(st.integers(0, 10**6))
    logits = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 3
    if data.draw(st.booleans()):
        logits = logits.round()
    chosen = [Sampling(**{**vars(one), "seed": seed + row}) for row, one in enumerate(chosen)]
    together = sample(logits, chosen, [generator_for(one) for one in chosen])
    probs = filtered_probs(logits, chosen)
    for row, one in enumerate(chosen):
        alone = sample(logits[row : row + 1], [one], [generator_for(one)])
        assert int(alone.ids) == int(together.ids[row])
        torch.testing.assert_close(alone.logprobs[0], together.logprobs[row])
        torch.testing.assert_close(filtered_probs(logits[row : row + 1], one)[0], probs[row])
        assert probs[row, together.ids[row]] > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_log_probabilities_are_those_before_truncation(dtype):
    logits = (torch.randn(16, 700, generator=torch.Generator().manual_seed(5)) * 3).to(dtype)
    generators = [generator_for(Sampling(seed=i)) for i in range(16)]
    drawn = sample(logits, Sampling(temperature=0.3, top_k=4), generators)
    expected = logits.double().log_softmax(-1).gather(-1, drawn.ids[:, None])[:, 0]
    torch.testing.assert_close(drawn.logprobs.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=0.7, top_k=6), Sampling(top_p=0.8), Sampling(min_p=0.2)],
    ids=str,
)
@pytest.mark.parametrize("width", [9, 1300])
def test_frequencies_follow_the_law(sampling, width):
    """Chi-square of 8,000 draws against the oracle's distribution, at one in a million."""
    logits = torch.full((1, width), -20.0)
    places = torch.linspace(0, width - 1, 9).long()
    logits[0, places] = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -2.0, 1.5, -0.5, 0.2])
    expected = transformers_probs(logits, sampling)[0, places].double()
    generator = generator_for(Sampling(seed=11))
    draws = 8_000
    ids = torch.cat(
        [
            sample(logits.expand(500, -1), sampling, [generator] * 500).ids
            for _ in range(draws // 500)
        ]
    )
    counts = (ids[:, None] == places[None]).sum(0).double()
    assert int(counts.sum()) >= draws - 5
    assert bool((counts[expected == 0] == 0).all())
    live = expected > 0
    statistic = float(((counts - draws * expected)[live] ** 2 / (draws * expected)[live]).sum())
    freedom = max(int(live.sum()) - 1, 1)
    # Wilson-Hilferty: the cube root of a chi-square over its freedom is nearly normal.
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert z < 4.75


@settings(max_examples=40, deadline=None)
@given(
    width=st.sampled_from([1, 2, 511, 512, 513, 2000]),
    seed=st.integers(0, 2**31),
    sparse=st.booleans(),
)
def test_draw_inverts_the_cumulative_sum(width, seed, sparse):
    weights = torch.rand(5, width, generator=torch.Generator().manual_seed(seed))
    if sparse:
        weights[:, : width - 1] *= weights[:, : width - 1] > 0.97
    drawn = draw(weights, [torch.Generator().manual_seed(seed + i) for i in range(5)])
    for row in range(5):
        u = torch.rand((), dtype=torch.float64, generator=torch.Generator().manual_seed(seed + row))
        exact = weights[row].double().cumsum(-1)
        index = int(drawn[row])
        slack = float(exact[-1]) * 1e-5  # the coarse level sums float32
        assert weights[row, index] > 0
        assert exact[index] >= u * exact[-1] - slack
        assert index == 0 or exact[index - 1] <= u * exact[-1] + slack


def test_extreme_temperatures_stay_finite():
    logits = torch.tensor([[3.0, -50.0, 2.999, 0.0]])
    for temperature, share in ((1e-30, 1.0), (1e30, 0.25)):
        probs = filtered_probs(logits, Sampling(temperature=temperature))
        assert probs[0, 0] == pytest.approx(share)


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
@pytest.mark.parametrize("width", [8, 1300])
def test_logits_that_are_not_numbers_are_named(sampling, width):
    broken = torch.zeros(3, 2, width)
    broken[0, 1, 3] = math.nan
    broken[1, 1, 3] = math.inf
    broken[2, 1] = -math.inf
    for logits in broken:
        with pytest.raises(LmsmithError, match="not finite"):
            sample(logits, sampling, [torch.Generator()] * 2)


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 1.01},
        {"top_p": -0.5},
        {"top_p": math.nan},
        {"min_p": 1.5},
        {"min_p": math.nan},
        {"seed": -1},
        {"seed": 2**64},
    ],
    ids=str,
)
def test_settings_out_of_range_are_one_clear_line(bad):
    with pytest.raises(UsageError) as caught:
        check_sampling(Sampling(**bad))
    message = str(caught.value)
    assert next(iter(bad)) in message and "must be" in message and "\n" not in message


def test_without_a_seed_two_rows_differ():
    logits = torch.zeros(2, 100_000)
    drawn = sample(logits, Sampling(), [generator_for(Sampling()), generator_for(Sampling())])
    assert drawn.ids[0] != drawn.ids[1]


def test_settings_must_be_one_a_row():
    with pytest.raises(ValueError, match="2 settings for 3 rows"):
        sample(torch.zeros(3, 4), [Sampling()] * 2, [torch.Generator()] * 3)
