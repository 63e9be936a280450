"""The chunked cross-entropy equals the plain one, and never holds all logits."""

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from lmsmith.training import chunked_cross_entropy

TOKENS, WIDTH, VOCABULARY = 7, 5, 11


def inputs(dtype=torch.float64):
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, dtype=dtype, requires_grad=True)
    bias = torch.randn(VOCABULARY, dtype=dtype, requires_grad=True)
    targets = torch.randint(VOCABULARY, (TOKENS,))
    scales = torch.rand(TOKENS, dtype=dtype)
    return hidden, weight, bias, targets, scales


def plain(hidden, weight, targets, bias=None, softcap=None, scales=None):
    logits = functional.linear(hidden, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    nll = functional.cross_entropy(logits, targets, reduction="none")
    return (nll if scales is None else nll * scales).sum()


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("full", [False, True])
def test_equals_the_plain_one(chunk, softcap, full):
    hidden, weight, bias, targets, scales = inputs()
    options = {"softcap": softcap} | ({"bias": bias, "scales": scales} if full else {})
    leaves = [hidden, weight, *([bias] if full else [])]
    wanted = plain(hidden, weight, targets, **options)
    got = chunked_cross_entropy(hidden, weight, targets, chunk=chunk, **options)
    assert torch.allclose(got, wanted, rtol=1e-12)
    for mine, theirs in zip(
        torch.autograd.grad(3 * got, leaves), torch.autograd.grad(3 * wanted, leaves), strict=True
    ):
        assert torch.allclose(mine, theirs, rtol=1e-10, atol=1e-12)


def test_gradient_by_finite_differences():
    hidden, weight, bias, targets, scales = inputs()

    def total(hidden, weight, bias):
        return chunked_cross_entropy(
            hidden, weight, targets, bias=bias, softcap=3.0, scales=scales, chunk=2
        )

    assert torch.autograd.gradcheck(total, (hidden, weight, bias))


def test_a_frozen_head_gets_no_gradient():
    hidden, weight, _, targets, _ = inputs()
    chunked_cross_entropy(hidden, weight.detach(), targets).backward()
    assert hidden.grad is not None


def test_no_tokens_is_a_loss_of_zero_with_a_graph():
    hidden, weight, _, _, _ = inputs()
    total = chunked_cross_entropy(hidden[:0], weight, torch.zeros(0, dtype=torch.long))
    total.backward()
    assert total == 0 and weight.grad.abs().max() == 0


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_is_near_and_summed_in_float32(autocast):
    hidden, weight, _, targets, _ = (t.detach() for t in inputs())
    wanted = plain(hidden, weight, targets)
    dtype = torch.float32 if autocast else torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got = chunked_cross_entropy(hidden.to(dtype), weight.to(dtype), targets)
    assert got.dtype == torch.float32
    assert abs(got - wanted) / wanted < 0.02


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return out


def test_memory_is_that_of_one_chunk():
    tokens, vocabulary, chunk = 64, 500, 4
    hidden = torch.randn(tokens, 8, requires_grad=True)
    weight = torch.randn(vocabulary, 8, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,))
    with Largest() as seen:
        chunked_cross_entropy(hidden, weight, targets, chunk=chunk).backward()
    assert seen.numbers <= max(chunk * vocabulary, vocabulary * 8)
    with Largest() as seen:
        plain(hidden, weight, targets).backward()
    assert seen.numbers == tokens * vocabulary
