"""What the adapter is trained on, and the loss it is trained with."""

import json

import pytest
import torch

from lmsmith.errors import UnknownNameError, UsageError
from lmsmith.methods.mixreasoning import making
from lmsmith.methods.mixreasoning.adapter import (
    PAPER,
    Candidate,
    ask,
    find_check,
    shortest_correct,
    training_example,
)
from lmsmith.models.adapter import Adapter
from lmsmith.testing import tiny_lm
from lmsmith.training import Loop, TrainSettings, collate, encode

PLAN = {
    "check": "number",
    "prompt": "{question}",
    "brief_prompt": "{question} briefly",
    "chat": False,
    "samples": 3,
    "max_tokens": 12,
    "temperature": 1.0,
    "top_p": 1.0,
    "seed": 0,
}


def test_the_shortest_correct_answer_is_kept():
    check = find_check("number")
    table = [
        Candidate("it is 7, so 42", 9),
        Candidate("41", 1),
        Candidate("so 42", 4),
        Candidate("42 ", 4),
        Candidate("42", 2, complete=False),
    ]
    assert shortest_correct(table, "The answer is 42.", check) == table[2]  # the first of equals
    assert shortest_correct(table, "40", check) is None
    assert shortest_correct([], "42", check) is None


@pytest.mark.parametrize(
    ("check", "answer", "reference", "right"),
    [
        ("number", "3 + 4 = 7, times 1,000 is 7,000", "work\n#### 7000", True),
        ("number", "no idea", "7", False),
        ("exact", " The  Sea ", "the sea", True),
        ("choice", "Not A. The answer is (B).", "B", True),
        ("choice", "Bees", "B", False),
        ("operator:eq", "a", "a", True),
    ],
)
def test_checks(check, answer, reference, right):
    assert bool(find_check(check)(answer, reference)) is right


def test_checks_that_are_not_there():
    with pytest.raises(UnknownNameError, match="did you mean 'number'"):
        find_check("numbr")
    for wrong in ("nowhere:f", "math:nothing", "math:pi"):
        with pytest.raises(UsageError, match="the check"):
            find_check(wrong)


def test_prompts_and_examples():
    assert ask("1+1?", "Q: {question}", False) == "Q: 1+1?"
    assert ask("1+1?", "{question}", True) == [{"role": "user", "content": "1+1?"}]
    with pytest.raises(UsageError, match="question"):
        ask("1+1?", "Q:", False)
    assert training_example("a", "b") == {"prompt": "a", "completion": "b"}
    chat = training_example([{"role": "user", "content": "a"}], "b")
    assert chat["messages"][-1] == {"role": "assistant", "content": "b"}


def test_the_loss_reaches_the_adapter_only_and_its_gradient_is_right():
    """Finite differences in float64; the prompt is no part of the loss."""
    lm = tiny_lm("gpt2", dtype=torch.float64)  # Llama's norms are float32 whatever the weights are
    adapter = Adapter.random(lm.model, ["c_attn", "c_fc"], rank=2, seed=0, scale=0.3)
    lm.load_adapter(adapter.double())
    settings = TrainSettings(tune="lora", precision="float32")
    tokens = encode([training_example("the cat", " sat on")], settings, lm)
    batch = collate(tokens, [0])
    assert int(batch.counted.sum()) == len(lm.encode(" sat on")) + 1
    ids = batch.ids[None]

    def loss():
        with adapter.at(1.0):
            logits = lm.model(ids).logits[0]
        return torch.nn.functional.cross_entropy(
            logits[batch.predictors], batch.targets, reduction="sum"
        )

    for parameter in adapter.parameters():
        parameter.requires_grad_(True)
    loss().backward()
    assert all(parameter.grad is None for parameter in lm.model.parameters())
    update = next(iter(adapter.updates.values()))
    for matrix in (update.down, update.up):
        for place in ((0, 0), (1, 1)):
            with torch.no_grad():
                matrix[place] += 1e-6
                above = loss()
                matrix[place] -= 2e-6
                below = loss()
                matrix[place] += 1e-6
            slope = float((above - below) / 2e-6)
            assert float(matrix.grad[place]) == pytest.approx(slope, rel=1e-5, abs=1e-7)


def test_strength_does_not_matter_before_training_and_the_base_stays():
    lm = tiny_lm()
    lm.load_adapter(Adapter.fresh(lm.model, ["all-linear"], rank=4, seed=0))
    session = lm.session()
    row = session.add(lm.encode("the cat"), strength=0.0)
    base = session.feed({row: []}).logits
    session.set_strength(row, 1.0)
    assert torch.equal(session.feed({row: []}).logits, base)
    before = {name: value.clone() for name, value in lm.model.named_parameters()}
    settings = TrainSettings(**{**PAPER, "learning_rate": 1e-2, "precision": "float32"})
    loop = Loop(lm.model, settings, 2, adapter=lm.adapter)
    tokens = encode([training_example("the cat", " sat on")], settings, lm)
    for _ in range(2):
        loop.step([collate(tokens, [0])])
    assert all(torch.equal(before[name], value) for name, value in lm.model.named_parameters())
    assert any(update.up.abs().max() > 0 for update in lm.adapter.updates.values())


def test_an_adapter_is_made_and_a_stopped_run_goes_on(tmp_path, monkeypatch):
    settings = TrainSettings(**{**PAPER, "batch_size": 2, "lora_rank": 2, "precision": "float32"})
    questions = [("the cat", "1"), ("the token", "2"), ("a word", "3")]

    def always(answer, reference):
        return True

    def few(lm, prompts, samples, *args):
        if calls:
            raise KeyboardInterrupt
        calls.append(prompts)
        return [[Candidate("sat", 2), Candidate("sat on", 3), Candidate("it", 1)] for _ in prompts]

    calls: list[list[str]] = []
    monkeypatch.setattr(making, "draw_answers", few)
    out = tmp_path / "adapter"
    with pytest.raises(KeyboardInterrupt):
        making.make_adapter(tiny_lm(), questions, always, settings, out, PLAN, batch_size=6)
    assert calls == [["the cat briefly", "the token briefly"]]
    with (out / making.ANSWERS).open("a") as file:
        file.write('[{"text": "ha')  # a crash in the middle of a line
    calls.clear()
    facts = making.make_adapter(tiny_lm(), questions, always, settings, out, PLAN, batch_size=6)
    assert calls == [["a word briefly"]]
    assert (facts["examples"], facts["tokens of a kept answer"]) == (3, 1.0)
    lm = tiny_lm()
    assert lm.load_adapter(out).folder == out
    assert json.loads((out / "adapter_config.json").read_text())["r"] == 2
    with pytest.raises(UsageError, match="samples 3, not 4"):
        making.make_adapter(tiny_lm(), questions, always, settings, out, {**PLAN, "samples": 4})
    none = tmp_path / "none"
    calls.clear()
    with pytest.raises(UsageError, match="is right"):
        making.make_adapter(
            tiny_lm(), questions[:1], find_check("number"), settings, none, PLAN, batch_size=6
        )


def test_answers_are_drawn_from_the_model_itself(tmp_path):
    from lmsmith.decoding.events import Sampling
    from lmsmith.methods.mixreasoning.adapter import draw_answers

    lm = tiny_lm()
    found = draw_answers(lm, ["the cat", "a"], 2, 6, Sampling(seed=3))
    assert [len(row) for row in found] == [2, 2]
    assert found == draw_answers(lm, ["the cat", "a"], 2, 6, Sampling(seed=3), batch_size=1)
    assert all(one.tokens <= 6 for row in found for one in row)
