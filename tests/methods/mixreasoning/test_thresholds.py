"""Calibration, rules of every criterion, settings, and the verbs that use them."""

import json
import math

import numpy as np
import pytest

from lmsmith.cli.main import main
from lmsmith.errors import ConfigError, ModelFileError, UsageError
from lmsmith.methods.mixreasoning import calibration, criteria
from lmsmith.methods.mixreasoning.calibration import Calibration
from lmsmith.methods.mixreasoning.config import MixReasoningConfig, paper
from lmsmith.methods.mixreasoning.controller import Mode, Rule
from lmsmith.models.adapter import Adapter
from lmsmith.testing import tiny_lm

SCORES = list(np.random.default_rng(0).normal(15, 5, 2000))


def spread(**changes):
    values = {"criterion": "confidence", "candidates": 20, "window": 16, "prompts": 3} | changes
    return Calibration.of(SCORES, **values)


def test_percentiles_and_gap():
    found = spread()
    for percentile in (1, 10, 35, 99):
        assert found.low(percentile) == pytest.approx(np.percentile(SCORES, percentile))
    assert found.low(12) == pytest.approx(np.percentile(SCORES, 12), abs=0.1)
    assert found.gap == pytest.approx(2.0, abs=0.1)  # the paper's +2 at a spread of 5
    with pytest.raises(UsageError, match="no answer reached the window"):
        Calibration.of([], "confidence", 20, 16, 3)


def test_it_is_kept_beside_others(tmp_path):
    path = tmp_path / calibration.FILE
    assert calibration.load(path) == {}
    calibration.save(path, spread())
    calibration.save(path, spread(criterion="margin"))
    assert calibration.load(path) == {"confidence": spread(), "margin": spread(criterion="margin")}
    assert [p.name for p in tmp_path.iterdir()] == [calibration.FILE]
    for wrong in ("{", '{"format": 9}', '{"format": 1, "criteria": {"a": {}}}'):
        path.write_text(wrong)
        with pytest.raises(ModelFileError, match="calibrate again"):
            calibration.load(path)


def test_thresholds_from_settings_or_calibration():
    known = {"confidence": spread()}
    rule = criteria.make_rule(MixReasoningConfig(percentile=30), known)
    assert rule == Rule.paper(spread().low(30), spread().low(30) + spread().gap, 16)
    assert criteria.make_rule(paper(), {}) == Rule.paper(18.0, 20.0, 16)
    assert criteria.make_rule(MixReasoningConfig(low=12.0), {}).high == 14.0
    assert criteria.make_rule(MixReasoningConfig(low=12.0, gap=0.5), {}).high == 12.5
    with pytest.raises(UsageError, match="calibrate MODEL"):
        criteria.make_rule(MixReasoningConfig(criterion="margin"), known)
    with pytest.raises(UsageError, match="window of 16, not 20 and 8"):
        criteria.make_rule(MixReasoningConfig(window=8), known)


def test_rules_of_the_other_criteria():
    make = criteria.make_rule
    reverse = make(MixReasoningConfig(criterion="reverse", low=3.0, high=4.0), {})
    assert (reverse.low, reverse.high) == (-4.0, -3.0)
    assert make(MixReasoningConfig(mode="concise"), {}).start is Mode.CONCISE
    assert make(MixReasoningConfig(mode="think"), {}).high == math.inf
    chance = make(MixReasoningConfig(criterion="random", share=0.3), {})
    assert (chance.low, chance.high, chance.window, chance.rewind) == (0.3, 0.3, 1, 15)
    assert make(MixReasoningConfig(criterion="random", boundary="."), {}).rewind == 0
    old = make(MixReasoningConfig(criterion="entropy-v1", t_up=0.6, t_down=0.2), {})
    assert (old.low, old.high, old.rewind, old.think_dwell) == (0.4, 0.8, 8, 16)
    words = make(MixReasoningConfig(criterion="keywords", window=4), {})
    assert 0.75 < words.low < 1 and words.low == words.high
    assert criteria.keyword_score("so Wa", "so Wait", ["Wait"]) == 0.0
    assert criteria.keyword_score("so Wait", "so Wait,", ["Wait"]) == 1.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"low": 2.0, "high": 1.0},
        {"high": 1.0},
        {"low": 1.0, "high": 2.0, "gap": 1.0},
        {"t_up": 0.1, "t_down": 0.2},
        {"criterion": "keywords", "keywords": ()},
        {"criterion": "margin", "low": 0.5},
        {"criterion": "confidnce"},
        {"windw": 3},
    ],
)
def test_settings_that_disagree(wrong):
    with pytest.raises(ConfigError):
        MixReasoningConfig(**wrong)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("mix")
    lm = tiny_lm()
    lm.model.save_pretrained(root / "model")
    lm.tokenizer.save_pretrained(root / "model")
    Adapter.random(lm.model, ["q_proj", "down_proj"], 4, seed=1, scale=0.3).save(root / "adapter")
    lines = [json.dumps({"question": text}) for text in ("the cat", "a word", "There were 12")]
    (root / "questions.jsonl").write_text("\n".join(lines))
    return root


def test_calibrate_then_generate(folders, capsys):
    model, adapter = str(folders / "model"), str(folders / "adapter")
    shared = ["--adapter", adapter, "--threads", "1"]
    code = main(["generate", model, "the cat", "--method", "mixreasoning", *shared])
    assert code == 2
    assert "calibrate MODEL" in capsys.readouterr().err
    words = ["mixreasoning", "calibrate", model, str(folders / "questions.jsonl"), *shared]
    assert main([*words, "--window", "4", "--max-tokens", "30", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["prompts"] == 3 and facts["tau_low at 10 %"] <= facts["tau_low at 40 %"]
    given = ["--window", "4", "--percentile", "40", "--max-tokens", "30", "--seed", "1", "--json"]
    assert main(["mixreasoning", "generate", model, "the cat", *shared, *given]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["method"] == "mixreasoning" and document["settings"]["window"] == 4
    trace = document["completions"][0]["trace"]
    assert trace["notes"]["generated"] == trace["tokens_kept"] + trace["tokens_discarded"]
    assert main([*words, "--criterion", "margn"]) == 2
    assert "did you mean 'margin'" in capsys.readouterr().err
    assert main([*words, "--question", "q"]) == 2
    assert "has no field 'q'; it has question" in capsys.readouterr().err


def test_modes_are_shown_in_colour(folders, capsys, monkeypatch):
    from lmsmith.display import theme

    monkeypatch.setenv("FORCE_COLOR", "1")
    # Made anew, since a test before may have made it without colour.
    monkeypatch.setattr(theme, "console", theme.console.__wrapped__)
    words = ["generate", str(folders / "model"), "the cat", "--method", "mixreasoning", "--show"]
    words += ["--adapter", str(folders / "adapter"), "--threads", "1", "--seed", "1"]
    assert main([*words, "--criterion", "random", "--window", "3", "--max-tokens", "30"]) == 0
    assert "\x1b[" in capsys.readouterr().out
