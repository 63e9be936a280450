"""The bench's own pieces: problems, the shift, word problems, one run in small."""

import pytest
import torch

from lmsmith.evaluation.bench import plan, run_bench
from lmsmith.methods.fg_ttl import real_model, toy, trial
from lmsmith.methods.fg_ttl.config import FGTTLConfig
from lmsmith.testing import tiny_lm


def test_problems_are_worked_out_right():
    for problem in toy.problems(50, 3):
        total, first, second = int(problem.prompt[:2]), problem.prompt[2], problem.prompt[3]
        terms = toy.LOWER.index(first) + 1, toy.UPPER.index(second) + 1
        steps = problem.answer.replace(",", ";").split(";")[:-1]
        assert len(steps) == toy.STEPS
        for number, step in enumerate(steps):
            total = (total + terms[number % 2]) % 100
            assert int(step) == total
    assert toy.problems(5, 1) == toy.problems(5, 1) != toy.problems(5, 2)


def test_the_tokenizer_has_a_token_a_character():
    tokens = toy.tokenizer()
    problem = toy.problems(1, 0)[0]
    text = problem.prompt + problem.answer
    ids = tokens.encode(text)
    assert len(ids) == len(text) and tokens.decode(ids) == text
    example = toy.example(problem)
    assert example["input_ids"] == [*ids, 0]
    assert sum(example["loss_mask"]) == len(problem.answer) + 1


def test_the_shift_is_the_seeds_and_as_large_as_asked():
    plain, one, two = (tiny_lm() for _ in range(3))
    toy.shift(one, 0.2, 5)
    toy.shift(two, 0.2, 5)
    for p, a, b in zip(
        plain.model.parameters(), one.model.parameters(), two.model.parameters(), strict=True
    ):
        assert torch.equal(a, b)
        if p.dim() == 2:
            assert (a - p).std() == pytest.approx(0.2 * p.std().item(), rel=0.1)
        else:
            assert torch.equal(a, p)


def test_a_word_problem_is_right_by_its_last_number():
    rows = real_model.word_problems(6, 0)
    assert len({row["prompt"] for row in rows}) == 6
    assert real_model.is_right("5 + 1,010 = 1,015.", 1015)
    assert not real_model.is_right("no number", 3)


def test_every_size_says_what_it_will_do():
    for size in ("smoke", "small", "full"):
        options = plan("fg-ttl", size)["options"]
        rates = [float(rate) for rate in options["rates"].split(",")]
        assert rates == sorted(rates) and options["preset_rate"] in rates
        for arm in options["arms"].split(","):
            FGTTLConfig(objective=arm)


def test_a_run_in_small(tmp_path, monkeypatch):
    monkeypatch.setenv("LMSMITH_CACHE", str(tmp_path / "cache"))
    options = {
        "training_problems": 128,
        "problems": 8,
        "source_problems": 4,
        "arms": "fg-ttl,temperature,tent",
        "rates": "1e-3,1e-1",
    }
    report = run_bench("fg-ttl", "smoke", out=tmp_path / "run", options=options)
    arms = {(row["section"], row["arm"]) for row in report.arms}
    assert {("rate 0.001", "frozen"), ("rate 0.001", "fg-ttl"), ("rate 0.1", "tent")} <= arms
    sources = [check["source"] for check in report.checks]
    assert sources and all("demand" in one or "plumbing" in one for one in sources)
    assert set(report.arms[0]["cost"]) == set(trial.ALSO)
