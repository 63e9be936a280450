"""Oracles of the losses: closed forms, stop-gradients, weights, the relatives' own code."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from lmsmith.methods.fg_ttl import objectives
from lmsmith.methods.fg_ttl.objectives import (
    cross_entropy,
    eata_weights,
    entropy,
    fading_mean,
    gain_weights,
    opinion_entropy,
    risk_temperature,
    tlm_loss,
)


def test_entropy_of_what_is_known():
    assert entropy(torch.zeros(2, 7)).tolist() == pytest.approx([math.log(7)] * 2)
    assert entropy(torch.tensor([0.0, 200.0, 0.0])) == 0
    assert entropy(torch.tensor([0.0, -math.inf, 0.0])) == pytest.approx(math.log(2))


def test_entropy_of_sixteen_bits_is_computed_in_thirty_two():
    logits = torch.randn(5, 1000).bfloat16()
    assert torch.equal(entropy(logits), entropy(logits.float()))


def test_a_ruled_out_token_has_no_gradient():
    logits = torch.tensor([0.3, -math.inf, 0.0], requires_grad=True)
    entropy(logits).backward()
    assert logits.grad.isfinite().all()


@given(seed=st.integers(0, 999), alpha=st.sampled_from([0.0, 0.2, 0.5, 2.0]))
def test_gradient_with_a_constant_temperature_is_the_closed_form(seed, alpha):
    z = torch.randn(4, 9, dtype=torch.float64, generator=torch.manual_seed(seed)) * 3
    z.requires_grad_(True)
    temperature = risk_temperature(entropy(z), alpha)
    values = entropy(z, temperature)
    (found,) = torch.autograd.grad(values.sum(), z)
    q = torch.softmax(z / temperature[:, None], dim=-1)
    wanted = -(q * (q.log() + values[:, None])) / temperature[:, None]
    torch.testing.assert_close(found, wanted.detach())


def test_gradient_through_the_temperature_would_differ():
    z = torch.randn(3, 6, dtype=torch.float64, generator=torch.manual_seed(0), requires_grad=True)
    (stopped,) = torch.autograd.grad(entropy(z, risk_temperature(entropy(z))).sum(), z)
    (through,) = torch.autograd.grad(entropy(z, 1 + 0.5 * entropy(z)).sum(), z)
    assert not torch.allclose(stopped, through, rtol=1e-2)


@given(a=st.floats(-6, 6))
def test_two_tokens_in_closed_form(a):
    z = torch.tensor([a, 0.0], dtype=torch.float64, requires_grad=True)

    def analytic(x):
        p = 1 / (1 + math.exp(-x))
        return math.log1p(math.exp(-x)) + (1 - p) * x, p

    h, p = analytic(a)
    assert entropy(z).item() == pytest.approx(h, abs=1e-12)
    temperature = 1 + 0.5 * h
    assert risk_temperature(entropy(z)).item() == pytest.approx(temperature)
    (plain,) = torch.autograd.grad(entropy(z), z)
    (risky,) = torch.autograd.grad(entropy(z, risk_temperature(entropy(z))), z)
    # dH/da = -a p (1 - p), and with q at a / T: -(a / T) q (1 - q) / T.
    assert plain[0].item() == pytest.approx(-a * p * (1 - p), abs=1e-12)
    q = 1 / (1 + math.exp(-a / temperature))
    assert risky[0].item() == pytest.approx(-a / temperature**2 * q * (1 - q), abs=1e-12)
    if abs(a) > 0.1:
        ratio = (risky[0] / plain[0]).item()
        assert ratio == pytest.approx(q * (1 - q) / (p * (1 - p)) / temperature**2)
        # The push is damped where the model is unsure.
        assert ratio < 1 or abs(a) > 1


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=20), st.floats(-100, 100))
def test_gain_weights_are_a_distribution_that_a_constant_does_not_change(gains, shift):
    gain = torch.tensor(gains, dtype=torch.float64)
    weights = gain_weights(gain)
    assert weights.sum().item() == pytest.approx(1)
    torch.testing.assert_close(weights, gain_weights(gain + shift), rtol=1e-6, atol=1e-9)
    assert gain_weights(gain, 1e9).tolist() == pytest.approx([1 / len(gains)] * len(gains))


def test_a_cold_gain_takes_the_best_alone():
    assert gain_weights(torch.tensor([0.1, 0.9, 0.3]), 1e-9).tolist() == [0, 1, 0]


def test_nothing_selected_has_no_weights():
    assert gain_weights(torch.zeros(0)).shape == (0,)


# The relatives, each beside its authors' few lines


def test_come():
    x = torch.randn(5, 12, generator=torch.manual_seed(1), requires_grad=True)
    mine = opinion_entropy(x, 1000)
    (gradient,) = torch.autograd.grad(mine.sum(), x)

    norm = torch.norm(x, p=2, dim=-1, keepdim=True)
    y = x / norm * norm.detach()
    total = torch.sum(torch.exp(y), dim=1, keepdim=True) + 1000
    probability = torch.cat([torch.exp(y) / total, 1000 / total], dim=1) + 1e-7
    wanted = -(probability * torch.log(probability)).sum(1)
    torch.testing.assert_close(mine, wanted)
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted.sum(), x)[0])
    # The norm is a constant, so the gradient cannot grow the logits as a whole.
    assert (gradient * x.detach()).sum(-1).abs().max() < 1e-5


def test_come_does_not_overflow():
    assert opinion_entropy(torch.tensor([[500.0, 0.0, -500.0]]), 1000).isfinite().all()


def test_eata():
    logits = torch.randn(40, 10, generator=torch.manual_seed(2)) * 2
    margin, d_margin = math.log(10) / 2 - 1 + 0.9, 0.5
    mean = torch.softmax(torch.randn(10, generator=torch.manual_seed(3)), 0)
    h = entropy(logits)

    first = torch.where(h < margin)
    cosine = functional.cosine_similarity(mean.unsqueeze(0), logits[first].softmax(1), dim=1)
    second = torch.where(torch.abs(cosine) < d_margin)
    kept = h[first][second]
    wanted = kept.mul(1 / torch.exp(kept - margin)).mean(0)
    assert 0 < len(kept) < len(first[0])

    assert (eata_weights(kept, margin) * kept).sum().item() == pytest.approx(wanted.item())
    assert objectives.eata_margin(1000) == math.log(1000) / 2 - 1


def test_running_means():
    new = torch.rand(4)
    assert torch.equal(fading_mean(None, new), new)
    assert fading_mean(0.5, 1.0) == pytest.approx(0.9 * 0.5 + 0.1)
    assert objectives.sar_margin(1000) == 0.4 * math.log(1000)


def test_tlm():
    perplexity = torch.tensor([2.0, 3.5, 3.0, 5.0], requires_grad=True)
    mine = tlm_loss(perplexity)
    (gradient,) = torch.autograd.grad(mine, perplexity)

    kept = perplexity[perplexity > 3]
    wanted = (0.1 * torch.exp(kept.detach() - 3) * kept).sum() / len(kept)
    assert mine.item() == pytest.approx(wanted.item())
    assert gradient.tolist() == pytest.approx([0, 0.05 * math.exp(0.5), 0, 0.05 * math.exp(2.0)])
    assert tlm_loss(torch.tensor([1.0, math.nan])) is None


def test_cross_entropy_is_the_surprise_at_each_target():
    logits, targets = torch.randn(3, 4, 9), torch.randint(9, (3, 4))
    wanted = -torch.log_softmax(logits, -1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(cross_entropy(logits, targets), wanted)
