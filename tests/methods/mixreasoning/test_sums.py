"""The task of the bench: its texts are right, and cuts go on as they should."""

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmsmith.methods.mixreasoning import sums
from lmsmith.methods.mixreasoning.sums import Problem, Step

TWO = st.integers(0, 99)
SEEDS = st.integers(0, 10**6)


@given(TWO, TWO)
def test_steps_are_right(a, b):
    step = Step("B", a, b)
    long, brief = step.at_length, step.in_brief()
    for x, y, z in re.findall(r"[:?](\d)\+(\d)=(\d\d)", long):
        assert int(x) + int(y) == int(z)
    for x, y, carry, z in re.findall(r",(\d)\+(\d)\+(\d)=(\d\d)", long):
        assert int(x) + int(y) + int(carry) == int(z)
    assert f"={(a + b) % 100:02d}?" in long and brief == f"B{a:02d}+{b:02d}={(a + b) % 100:02d};"
    assert len(long) >= 3.5 * len(brief)
    assert set(long + brief) <= set(sums.ALPHABET)


@given(TWO, TWO, st.data())
def test_a_cut_step_is_finished_with_its_result(a, b, data):
    step = Step("B", a, b)
    long = step.at_length
    cut = data.draw(st.integers(1, len(long) - 1))
    text = long[:cut] + step.finished(cut)
    assert text.endswith(";") and text.count(";") == 1
    assert f"={(a + b) % 100:02d}" in text
    assert len(text) <= len(long)


@pytest.mark.parametrize("make", [sums.think_example, sums.brief_example])
@given(seed=SEEDS)
def test_examples_train_on_what_their_mode_writes(make, seed):
    rng = random.Random(seed)
    problem = Problem.draw(rng)
    pieces = make(problem, rng)
    text = sums.joined(pieces)
    assert text.startswith(problem.prompt) and pieces[0] == (problem.prompt, False)
    assert set(text) <= set(sums.ALPHABET)
    assert pieces[-1][1] and sums.final_answer(text) is not None
    learned = "".join(part for part, counts in pieces if counts)
    assert "?" not in learned if make is sums.brief_example else "?" in learned or learned[0] == "#"


@given(SEEDS)
def test_problems_know_their_answer_and_their_hard_steps(seed):
    problem = Problem.draw(random.Random(seed))
    total, text = problem.operands[0], ""
    for (label, number), carries, trivial in zip(
        problem.added, problem.carries, problem.trivial, strict=True
    ):
        assert carries == (total % 10 + number % 10 >= 10)
        assert not (carries and trivial)
        text += Step(label, total, number).at_length
        total = (total + number) % 100
    assert sums.final_answer(f"{text}#{total:02d}") == problem.answer == f"{total:02d}"
    spans = sums.step_spans(text)
    assert len(spans) == 3 and spans[-1][1] == len(text)


def test_the_tokenizer_is_one_token_a_character():
    from lmsmith.methods.mixreasoning import tiny

    lm = tiny.untrained(0, width=32, layers=1)
    problem = Problem((37, 5, 10, 48))
    pieces = [(problem.prompt, False), (Step("B", 37, 5).at_length, True)]
    example = tiny.example(pieces)
    assert lm.encode(sums.joined(pieces)) == example["input_ids"][:-1]
    assert lm.decode(example["input_ids"]) == sums.joined(pieces)
    assert sum(example["loss_mask"]) == len(Step("B", 37, 5).at_length) + 1
    assert lm.eos_ids == {0}
