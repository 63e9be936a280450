"""The default loss equals transformers' own, and examples in one row do not see each other."""

import pytest
import torch
from torch.nn import functional
from training_examples import Recurrent, batch_of, ids_of

from lmsmith.testing import FAMILIES, tiny_model
from lmsmith.training import NextTokenLoss, hidden_states

LENGTHS = (5, 12, 2, 9, 12)


def reference(model, examples):
    """Sum over examples of the loss of each alone, as transformers computes it from labels."""
    total = 0.0
    for example in examples:
        ids = torch.tensor([example["input_ids"]])
        counted = torch.tensor([example["loss_mask"]])
        counted[:, 0] = False
        labels = torch.where(counted, ids, -100)
        total = total + model(input_ids=ids, labels=labels).loss * counted.sum()
    return total


def gradients(model, total):
    found = torch.autograd.grad(total, [p for p in model.parameters() if p.requires_grad])
    return torch.cat([gradient.flatten() for gradient in found])


@pytest.mark.parametrize("lengths", [LENGTHS, (7, 7, 7)])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_each_example_alone(family, lengths):
    model = tiny_model(family, dtype=torch.float64, vocabulary=60).requires_grad_(True)
    examples = ids_of(lengths)
    loss = NextTokenLoss(model, chunk=3)
    assert loss.packed
    found = loss(model, batch_of(examples))
    wanted = reference(model, examples)
    assert found.weight == sum(sum(e["loss_mask"][1:]) for e in examples)
    # transformers rounds logits and rotary angles to float32 even here.
    assert torch.allclose(found.total, wanted.double(), rtol=1e-6)
    mine, theirs = gradients(model, found.total), gradients(model, wanted)
    assert (mine - theirs).norm() / theirs.norm() < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_an_example_does_not_see_its_neighbours(family):
    model = tiny_model(family, vocabulary=60)
    one, other = batch_of(ids_of(LENGTHS)), batch_of(ids_of(LENGTHS))
    other.ids[5:17] = (other.ids[5:17] + 1) % 60
    with torch.no_grad():
        before, after = hidden_states(model, one), hidden_states(model, other)
    assert torch.equal(before[:5], after[:5])
    assert torch.equal(before[17:], after[17:])
    assert not torch.equal(before[5:17], after[5:17])


def test_a_model_whose_head_does_more_uses_its_own_logits():
    from transformers import GraniteConfig, GraniteForCausalLM

    config = GraniteConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        logits_scaling=5.0,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    model = GraniteForCausalLM(config).eval()
    examples = ids_of(LENGTHS)
    loss = NextTokenLoss(model)
    assert not loss.packed
    with torch.no_grad():
        assert torch.allclose(
            loss(model, batch_of(examples)).total, reference(model, examples), rtol=1e-5
        )


def test_plain_modules_get_padded_rows():
    model = Recurrent()
    examples = ids_of(LENGTHS)
    total = NextTokenLoss(model)(model, batch_of(examples)).total
    wanted = sum(
        functional.cross_entropy(
            model(torch.tensor([e["input_ids"]]))[0, :-1],
            torch.tensor(e["input_ids"][1:]),
            reduction="none",
        )[torch.tensor(e["loss_mask"][1:])].sum()
        for e in examples
    )
    assert torch.allclose(total, wanted, rtol=1e-5)


def test_dropout_of_attention_is_the_models_own():
    model = tiny_model("llama", vocabulary=60, attention_dropout=0.5)
    loss, batch = NextTokenLoss(model), batch_of(ids_of(LENGTHS))
    with torch.no_grad():
        still = [loss(model, batch).total for _ in range(2)]
        model.train()
        moving = [loss(model, batch).total for _ in range(2)]
    assert still[0] == still[1] and moving[0] != moving[1]
