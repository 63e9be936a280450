"""Adapters equal PEFT's at every strength, read and write its files, and can be trained."""

import copy
import json

import peft
import pytest
import torch
from session_reference import TARGETS, Reference

from lmsmith.errors import CapabilityError, ModelFileError, UsageError
from lmsmith.models.adapter import Adapter
from lmsmith.models.lm import LM
from lmsmith.models.session import Session
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
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", strength)
    with torch.no_grad():
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
    rows = {s: session.add(IDS, strength=s) for s in (0.0, 0.5, 1.0)}
    step = session.feed({row: [] for row in rows.values()})
    assert session.forward_calls == 1
    if not settings.get("use_rslora"):  # PEFT's set_scale forgets the square root
        for strength in (0.5,):
            expected = peft_logits(model, strength)
            assert (step.all_logits(rows[strength]) - expected).abs().max() < 1e-5
    peft_one = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
    with torch.no_grad():
        at_one = peft_one(torch.tensor([IDS])).logits[0]
        at_zero = Reference(base).model(torch.tensor([IDS])).logits[0]
    assert (step.all_logits(rows[1.0]) - at_one).abs().max() < 1e-5
    assert (step.all_logits(rows[0.0]) - at_zero).abs().max() < 1e-5
    assert (at_one - at_zero).abs().max() > 0.1


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
