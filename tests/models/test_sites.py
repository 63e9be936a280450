"""Sites are what their names say, can be read and edited a row, and leave nothing behind."""

import copy

import pytest
import torch
from session_reference import Reference

from lmsmith.errors import CapabilityError, UnknownNameError, UsageError
from lmsmith.models.lm import LM
from lmsmith.models.session import Session, Tree
from lmsmith.testing import FAMILIES, tiny_model

IDS = [5, 9, 2, 33, 60, 1, 7, 8, 44]


def opened(family="llama"):
    model = tiny_model(family, vocabulary=64)
    return model, Session(LM(model, None, name=family))


def captured(session, sites, ids=IDS):
    row = session.add(ids)
    with session.capture(sites):
        return session.feed({row: []}).sites


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_residual_stream_adds_up(family):
    _, session = opened(family)
    halves = ("resid_in", "attn_out", "mlp_out", "resid_out")
    found = captured(session, [f"layers.{n}.{half}" for n in range(3) for half in halves])
    for n in range(3):
        before, attention, mlp, after = (found[f"layers.{n}.{half}"] for half in halves)
        assert before.shape == (1, len(IDS), 32)
        assert (before + attention + mlp - after).abs().max() < 1e-5
        assert attention.abs().max() > 1e-3 and mlp.abs().max() > 1e-3
        if n:
            assert torch.equal(before, found[f"layers.{n - 1}.resid_out"])


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_the_hidden_states_of_transformers(family):
    model, session = opened(family)
    found = captured(session, ["embed", *(f"layers.{n}.resid_out" for n in range(3)), "final"])
    with torch.no_grad():
        states = model(torch.tensor([IDS]), output_hidden_states=True).hidden_states
    expected = dict(
        zip(("embed", "layers.0.resid_out", "layers.1.resid_out"), states, strict=False)
    )
    expected["final"] = states[-1]
    for site, state in expected.items():
        assert (found[site] - state).abs().max() < 1e-4, site


@pytest.mark.parametrize("family", FAMILIES)
def test_silencing_a_half_equals_a_model_with_zero_weights_there(family):
    model, session = opened(family)
    silent = copy.deepcopy(model)
    layer = silent.get_decoder().h[1] if family == "gpt2" else silent.get_decoder().layers[1]
    if family == "gemma3":
        layer.post_feedforward_layernorm.weight.data.fill_(-1.0)  # its factor is 1 + weight
    elif family == "gpt2":
        layer.mlp.c_proj.weight.data.zero_()
        layer.mlp.c_proj.bias.data.zero_()
    else:
        layer.mlp.down_proj.weight.data.zero_()
    row = session.add(IDS)
    with session.edit({"layers.1.mlp_out": torch.zeros_like}):
        session.feed({row: []})
        step = session.feed({row: [3]})
    expected = Reference(silent).logits([*IDS, 3])
    assert (step.logits[0] - expected[-1]).abs().max() < 1e-4
    assert (expected - Reference(model).logits([*IDS, 3])).abs().max() > 0.01


def test_edits_of_any_site_reach_what_follows_them():
    for site in ("embed", "layers.0.resid_in", "layers.2.attn_out", "layers.1.resid_out", "final"):
        model, session = opened()
        row = session.add(IDS)
        with session.edit({site: lambda x: x * 1.5 + 1}), session.capture([site]):
            step = session.feed({row: []})
        plain = captured(session, [site])[site]
        assert (step.sites[site] - (plain * 1.5 + 1)).abs().max() < 1e-5
        assert (step.all_logits(row) - Reference(model).logits(IDS)).abs().max() > 0.01


def test_edits_see_the_rows_fed_in_their_order():
    model, session = opened()
    rows = [session.add(IDS[: 3 + n]) for n in range(5)]
    session.feed({row: [] for row in rows})
    seen = []

    def only_the_first(activation):
        seen.append(activation.shape)
        activation = activation.clone()
        activation[0] += 1
        return activation

    order = [rows[4], rows[0], rows[2], rows[3]]  # rows[1] idles between them
    with session.edit({"layers.1.resid_out": only_the_first}):
        step = session.feed({row: [11] for row in order})
    assert seen == [(4, 1, 32)]
    for place, row in enumerate(order):
        expected = Reference(model).logits(session.tokens(row))[-1]
        changed = (step.logits[place] - expected).abs().max() > 1e-3
        assert changed == (place == 0)


def test_captures_follow_the_rows_asked_for_ragged_and_trees():
    _, session = opened()
    short, long = session.add(IDS[:2]), session.add(IDS)
    with session.capture(["layers.2.resid_out"]):
        step = session.feed({long: [1], short: Tree([1, 2], [-1, -1])})
    found = step.sites["layers.2.resid_out"]
    assert found.shape == (2, 10, 32)
    for place, tokens, at in ((0, [*IDS, 1], 9), (1, [*IDS[:2], 1], 2), (1, [*IDS[:2], 2], 3)):
        _, alone = opened()
        expected = captured(alone, ["layers.2.resid_out"], tokens)["layers.2.resid_out"][0, -1]
        assert (found[place, at] - expected).abs().max() < 1e-5


def test_captures_can_be_trained_on():
    _, session = opened()
    activation = captured(session, ["layers.1.resid_out"])["layers.1.resid_out"]
    probe = torch.nn.Linear(32, 1)
    probe(activation).sum().backward()
    assert torch.allclose(probe.weight.grad, activation.sum((0, 1))[None], atol=1e-5)
    activation += 1


def test_nothing_is_left_behind():
    model, session = opened()
    before = hooks(model)
    row = session.add(IDS)
    with session.capture(["embed"]), session.edit({"final": lambda x: x}):
        inside = session.feed({row: []})
        assert hooks(model) == before  # they live during a forward only
        model(torch.tensor([IDS]))
    after = session.feed({row: [1]})
    assert list(inside.sites) == ["embed"] and after.sites == {}
    assert hooks(model) == before


def test_wrong_sites_and_edits():
    _, session = opened()
    with (
        pytest.raises(UnknownNameError, match=r"did you mean 'layers\.2\.attn_out'"),
        session.capture(["layers.2.attn_oui"]),
    ):
        pass
    with (
        pytest.raises(UnknownNameError, match=r"unknown site 'layers\.3\.attn_out'"),
        session.edit({"layers.3.attn_out": lambda x: x}),
    ):
        pass
    with (
        pytest.raises(UsageError, match="the edit at final was never reached"),
        session.edit({"final": lambda x: x}),
    ):
        pass
    row = session.add(IDS)
    with (
        pytest.raises(UsageError, match=r"must return a tensor of shape \(1, 9, 32\)"),
        session.edit({"final": lambda x: x[:, :1]}),
    ):
        session.feed({row: []})
    with pytest.raises(KeyError), session.edit({"final": lambda x: x}):
        raise KeyError  # an error within is not hidden by the edit that was not reached


def test_an_unnamed_family_is_known_by_its_modules():
    model, session = opened()
    model.config.model_type = "brand_new"
    found = captured(session, ["layers.0.attn_out", "layers.0.resid_in"])
    assert found["layers.0.attn_out"].shape == (1, 9, 32)
    model.get_decoder().layers[0].residual_multiplier = 0.5
    with (
        pytest.raises(CapabilityError, match=r"sites are known.*'brand_new'"),
        session.capture(["embed"]),
    ):
        pass
