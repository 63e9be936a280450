import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmsmith.methods.byte_sampler.combine import mix, product, proxy


def vectors(count: int, seed: int, rows: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, rows, 257, dtype=torch.float64, generator=generator)
    logits[:, :, 200:256] = -math.inf  # bytes that never begin a character
    return torch.log_softmax(4 * logits, dim=-1)


def test_mix_is_the_mean_of_probabilities():
    each = vectors(2, 0)
    expected = (each[0].exp() + each[1].exp()) / 2
    assert torch.allclose(mix(each).exp(), expected, atol=1e-15)


def test_product_by_hand():
    each = torch.log(torch.tensor([[0.5, 0.5], [0.9, 0.1]], dtype=torch.float64))
    # sqrt(0.45) : sqrt(0.05) = 3 : 1
    assert torch.allclose(product(each).exp(), torch.tensor([0.75, 0.25], dtype=torch.float64))


@given(st.integers(0, 1000), st.sampled_from([2, 3]))
def test_a_model_with_itself_is_the_model(seed, count):
    each = vectors(1, seed).expand(count, -1, -1)
    for together in (mix(each), product(each)):
        assert torch.allclose(together.exp(), each[0].exp(), atol=1e-14)


@given(st.integers(0, 1000))
def test_alpha_zero_is_the_base_to_the_bit(seed):
    base, expert, antiexpert = vectors(3, seed)
    assert torch.equal(proxy(base, expert, antiexpert, 0.0), base)


@given(st.integers(0, 1000), st.floats(-3, 3))
def test_expert_equal_to_antiexpert_is_the_base(seed, alpha):
    base, expert, _ = vectors(3, seed)
    assert torch.allclose(proxy(base, expert, expert, alpha).exp(), base.exp(), atol=1e-14)


def test_proxy_by_hand():
    base, expert, anti = torch.log(
        torch.tensor([[0.5, 0.5], [0.8, 0.2], [0.4, 0.6]], dtype=torch.float64)
    )
    # 0.5 * 0.8 / 0.4 = 1 against 0.5 * 0.2 / 0.6 = 1/6
    expected = torch.tensor([6 / 7, 1 / 7], dtype=torch.float64)
    assert torch.allclose(proxy(base, expert, anti, 1.0).exp(), expected)


@pytest.mark.parametrize("alpha", [-1.0, 0.5, 1.0])
def test_bytes_ruled_out_by_a_small_model_do_not_spoil_the_vector(alpha):
    base, expert, anti = vectors(3, 7)
    expert = expert.clone()
    expert[:, 10] = -math.inf
    anti = anti.clone()
    anti[:, 20] = -math.inf
    found = proxy(base, torch.log_softmax(expert, -1), torch.log_softmax(anti, -1), alpha)
    assert not found.isnan().any()
    assert torch.allclose(found.exp().sum(-1), torch.ones(3, dtype=torch.float64))
    assert (found[:, 200:256] == -math.inf).all()


def test_proxy_leaves_the_base_where_the_antiexpert_rules_a_byte_out():
    base, expert, anti = torch.log(
        torch.tensor([[0.9, 0.05, 0.05], [0.98, 0.01, 0.01], [0.5, 0.5, 0.0]], dtype=torch.float64)
    )
    weights = torch.tensor([0.9 * 0.98 / 0.5, 0.05 * 0.01 / 0.5, 0.05], dtype=torch.float64)
    assert torch.allclose(proxy(base, expert, anti).exp(), weights / weights.sum())
    # With a negative alpha the roles change.
    weights = torch.tensor([0.9 * 0.98 / 0.5, 0.05 * 0.01 / 0.5, 0.05], dtype=torch.float64)
    assert torch.allclose(proxy(base, anti, expert, -1.0).exp(), weights / weights.sum())


def test_models_that_rule_out_everything_between_them():
    each = torch.log(torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.5, 0.5]], dtype=torch.float64))
    expected = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    assert torch.allclose(product(each).exp(), expected)
    assert torch.equal(proxy(each[0], each[1], each[1].flip(-1)).exp(), each[0].exp())
    assert torch.equal(proxy(each[0], each[1], torch.log(expected)).exp(), each[0].exp())
