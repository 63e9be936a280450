"""The real model's arm, from questions to tables, on a tiny model."""

import json

from lmsmith.evaluation.bench import declare, run_bench
from lmsmith.methods.mixreasoning import making, real
from lmsmith.methods.mixreasoning.adapter import Candidate
from lmsmith.testing import tiny_lm

OPTIONS = {
    "real_train": 4,
    "real_steps": 1,
    "real_calibration": 2,
    "real_test": 3,
    "real_tokens": 12,
    "real_window": 3,
}


def test_questions_become_tables(tmp_path, monkeypatch):
    monkeypatch.setenv("LMSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        making,
        "draw_answers",
        lambda lm, prompts, samples, *_: [[Candidate("7", 1)] * samples for _ in prompts],
    )
    for name in ("train", "test"):
        lines = [json.dumps({"question": f"{i} + 3?", "answer": "#### 7"}) for i in range(6)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))

    @declare(options={"smoke": OPTIONS})
    def arm(bench):
        real.real_model(bench, tiny_lm(), tmp_path)

    report = run_bench("real", "smoke", out=tmp_path / "run", bench=arm)
    arms = [row["arm"] for row in report.arms if row["metric"] == "exact answers"]
    assert arms == ["think", "concise", "mix"]
    assert {row["items"] for row in report.arms} == {3}
    again = run_bench("real", "smoke", out=tmp_path / "run", bench=arm)
    assert again.to_dict()["arms"] == report.to_dict()["arms"]
