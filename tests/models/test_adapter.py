"""Adapters equal PEFT's at every strength, read and write its files, and can be trained."""

import copy
import itertools
import json

import peft
import pytest
import torch
from peft.helpers import rescale_adapter_scale
from session_reference import TARGETS, Reference

from lmsmith.errors import CapabilityError, ModelFileError, UsageError
from lmsmith.models.adapter import Adapter
from lmsmith.models.lm import LM
from lmsmith.models.session import Session, Tree
from lmsmith.testing import tiny_model

VOCABULARY = 64
IDS = [5, 9, 2, 33, 60, 1]


def peft_model(family, **settings):
    """A PEFT-wrapped copy of the tiny model, both factors random."""
    base = tiny_model(family, vocabulary=VOCABULARY)
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=TARGETS[family], task_type="CAUSAL_LM", **settings
    )
    torch.manual_seed(1)
    model = peft.get_peft_model(copy.deepcopy(base), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return base, model.eval()


def peft_logits(model, strength):
    """PEFT's own `scale_layer`, which multiplies whatever scaling a layer has."""
    with torch.no_grad(), rescale_adapter_scale(model, strength):
        return model(torch.tensor([IDS])).logits[0]


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("qwen2", {}),
        ("gpt2", {"fan_in_fan_out": True}),
        ("llama", {"use_rslora": True}),
        ("qwen2", {"rank_pattern": {"k_proj": 2}, "alpha_pattern": {"0.self_attn.o_proj": 9}}),
    ],
)
def test_equal_to_peft_at_strengths(family, settings, tmp_path):
    base, model = peft_model(family, **settings)
    model.save_pretrained(tmp_path)
    lm = LM(base, None, name=family)
    lm.load_adapter(tmp_path)
    session = Session(lm)
    strengths = (0.0, 0.5, 1.0, 2.0, -0.75)
    rows = {s: session.add(IDS, strength=s) for s in strengths}
    step = session.feed({row: [] for row in rows.values()})
    assert session.forward_calls == 1
    expected = {strength: peft_logits(model, strength) for strength in strengths}
    for strength, row in rows.items():
        assert (step.all_logits(row) - expected[strength]).abs().max() < 1e-5, strength
    # A strength that were taken for another would show.
    for one, other in itertools.combinations(expected.values(), 2):
        assert (one - other).abs().max() > 0.1
    base_logits = Reference(base).logits(IDS)
    assert (step.all_logits(rows[0.0]) - base_logits).abs().max() < 1e-5


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_peft_reads_what_we_write(family, tmp_path):
    base = tiny_model(family, vocabulary=VOCABULARY)
    adapter = Adapter.random(base, TARGETS[family], rank=3, seed=2, alpha=5, scale=0.3)
    adapter.save(tmp_path)
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
    with torch.no_grad():
        expected = theirs(torch.tensor([IDS])).logits[0]
    found = Reference(base, adapter).logits(IDS, 1.0)
    assert (found - expected).abs().max() < 1e-5
    again = Adapter.load(tmp_path)
    assert again.updates.keys() == adapter.updates.keys()
    for name, update in adapter.updates.items():
        assert torch.equal(again.updates[name].down, update.down)
        assert torch.equal(again.updates[name].up, update.up)
        assert again.updates[name].scaling == update.scaling == 5 / 3


def test_the_same_seed_gives_the_same_adapter():
    model = tiny_model("llama")
    one, same, other = (Adapter.random(model, ["q_proj"], 2, seed) for seed in (1, 1, 2))
    name = "model.layers.0.self_attn.q_proj"
    assert list(one.updates) == [f"model.layers.{n}.self_attn.q_proj" for n in range(3)]
    assert torch.equal(one.updates[name].up, same.updates[name].up)
    assert not torch.equal(one.updates[name].up, other.updates[name].up)


def test_outside_its_context_the_model_is_the_base_model():
    model = tiny_model("llama", vocabulary=VOCABULARY)
    before = model(torch.tensor([IDS])).logits
    adapter = Adapter.random(model, ["q_proj"], 2, 0, scale=0.5)
    adapter.attach(model)
    assert torch.equal(model(torch.tensor([IDS])).logits, before)
    with adapter.at(1.0):
        assert not torch.allclose(model(torch.tensor([IDS])).logits, before)
    assert torch.equal(model(torch.tensor([IDS])).logits, before)
    adapter.detach()
    with adapter.at(1.0):
        assert torch.equal(model(torch.tensor([IDS])).logits, before)


def test_only_the_adapter_learns():
    model = tiny_model("llama", vocabulary=VOCABULARY)
    adapter = Adapter.random(model, ["q_proj", "up_proj"], 2, 0)
    adapter.attach(model)
    assert len(list(adapter.parameters())) == 2 * 2 * 3
    optimizer = torch.optim.Adam(adapter.parameters(), lr=0.05)
    batch = torch.tensor([IDS])
    losses = []
    for _ in range(20):
        with adapter.at(1.0):
            loss = model(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peft_type": "IA3"}, "kind IA3"),
        ({"bias": "all"}, "bias 'all'"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ],
)
def test_other_kinds_are_refused_in_a_line(change, words, tmp_path):
    model = tiny_model("llama")
    Adapter.random(model, ["q_proj"], 2, 0).save(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CapabilityError, match=words) as caught:
        Adapter.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_broken_files(tmp_path):
    with pytest.raises(ModelFileError, match=r"no adapter_config\.json"):
        Adapter.load(tmp_path)
    model = tiny_model("llama")
    Adapter.random(model, ["q_proj"], 2, 0).save(tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    whole = weights.read_bytes()
    for cut in (0, 5, len(whole) // 2, len(whole) - 1):
        weights.write_bytes(whole[:cut])
        with pytest.raises(ModelFileError, match="corrupt"):
            Adapter.load(tmp_path)
    weights.write_bytes(whole)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ModelFileError, match="corrupt"):
        Adapter.load(tmp_path)
    weights.unlink()
    with pytest.raises(ModelFileError, match=r"no adapter_model\.safetensors"):
        Adapter.load(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "null",
        '"LORA"',
        '{"peft_type": "LORA", "lora_alpha": "much"}',
        '{"peft_type": "LORA", "lora_alpha": null}',
        '{"peft_type": "LORA", "lora_alpha": 2, "alpha_pattern": ["q_proj"]}',
        '{"peft_type": "LORA", "lora_alpha": 2, "alpha_pattern": {"q_proj(": 3}}',
    ],
)
def test_broken_settings_are_told_in_a_line(text, tmp_path):
    Adapter.random(tiny_model("llama"), ["q_proj"], 2, 0).save(tmp_path)
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(ModelFileError, match="corrupt") as caught:
        Adapter.load(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("saved", [torch.float16, torch.bfloat16])
def test_a_half_precision_adapter_is_widened_beside_float32_weights(saved, tmp_path):
    model = tiny_model("llama", vocabulary=VOCABULARY)
    Adapter.random(model, TARGETS["llama"], 2, 0, scale=0.3).to(saved).save(tmp_path)
    lm = LM(model, None)
    adapter = lm.load_adapter(tmp_path)
    assert {parameter.dtype for parameter in adapter.parameters()} == {torch.float32}
    session = Session(lm)
    found = session.feed({session.add(IDS): []}).logits[0]
    assert (found - Reference(model, adapter).logits(IDS, 1.0)[-1]).abs().max() < 1e-5
    # Beside weights of half precision the adapter keeps what it has.
    half = LM(tiny_model("llama", dtype=torch.bfloat16), None)
    assert {p.dtype for p in half.load_adapter(tmp_path).parameters()} == {saved}


def test_an_adapter_goes_where_the_model_is():
    model = tiny_model("llama")
    adapter = Adapter.random(model, ["q_proj"], 2, 0)
    adapter.attach(model.to("meta"))  # a device that every machine has
    assert {parameter.device.type for parameter in adapter.parameters()} == {"meta"}


def test_replacing_an_adapter_leaves_no_keys_of_the_old_one():
    model = tiny_model("llama", vocabulary=VOCABULARY)
    old, new = (Adapter.random(model, TARGETS["llama"], 2, seed, scale=0.3) for seed in (1, 2))
    lm = LM(model, None)
    lm.load_adapter(old)
    session = Session(lm)
    rows = {s: session.add(IDS, strength=s) for s in (0.0, 0.5, 1.0)}
    session.feed({row: [7] for row in rows.values()})
    [node] = session.feed({rows[1.0]: Tree([8], [-1])}).nodes[rows[1.0]]
    lm.load_adapter(new)
    computed = session.tokens_computed
    step = session.feed({rows[0.0]: [9], rows[0.5]: [9], rows[1.0]: Tree([9], [node])})
    assert session.tokens_computed == computed + 1 + 8 + 9  # the base model's keys stand
    reference = Reference(model, new)
    for (strength, row), found in zip(rows.items(), step.logits, strict=True):
        kept = [*session.tokens(row), 8, 9] if strength == 1.0 else session.tokens(row)
        assert (found - reference.logits(kept, strength)[-1]).abs().max() < 1e-4
    lm.adapter = None
    with pytest.raises(CapabilityError, match="needs an adapter"):
        session.feed({rows[1.0]: Tree([9], [node])})


def test_an_adapter_that_does_not_fit_leaves_the_one_before():
    model = tiny_model("llama", vocabulary=VOCABULARY)
    lm = LM(model, None)
    first = lm.load_adapter(Adapter.random(model, ["q_proj"], 2, 1, scale=0.3))
    wrong = Adapter.random(tiny_model("llama", hidden_size=64), ["q_proj"], 2, 2)
    with pytest.raises(CapabilityError):
        lm.load_adapter(wrong)
    assert lm.load_adapter(first) is lm.adapter is first  # once more: hooked once, not twice
    session = lm.session([IDS])
    found = session.feed({0: []}).logits[0]
    assert (found - Reference(model, first).logits(IDS, 1.0)[-1]).abs().max() < 1e-5


def test_an_adapter_of_another_model_is_refused():
    adapter = Adapter.random(tiny_model("llama"), ["q_proj"], 2, 0)
    with pytest.raises(CapabilityError, match="a linear layer"):
        adapter.attach(tiny_model("gpt2"))
    with pytest.raises(CapabilityError, match="a map from 32 to 32"):
        adapter.attach(tiny_model("llama", hidden_size=64))
    with pytest.raises(UsageError, match="no linear module"):
        Adapter.random(tiny_model("llama"), ["query"], 2, 0)
    head = tiny_model("llama")
    with pytest.raises(CapabilityError, match="lm_head"):
        Adapter.random(head, ["lm_head"], 2, 0).attach(head)
