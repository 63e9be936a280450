"""The training bench runs, and its arms compute the same."""

from lmsmith.evaluation.bench import run_bench
from lmsmith.evaluation.training_bench import OURS
from lmsmith.testing import tiny_lm


def test_on_a_tiny_model(tmp_path):
    lm = tiny_lm()
    lm.model.save_pretrained(tmp_path / "model")
    lm.tokenizer.save_pretrained(tmp_path / "model")
    report = run_bench(
        "training",
        "smoke",
        [str(tmp_path / "model")],
        tmp_path / "run",
        options={"steps": 3, "precision": "float32"},
    )
    by_name = {check["name"]: check for check in report.checks}
    same = [check for name, check in by_name.items() if name.startswith("largest difference")]
    assert len(same) == 3 and all(check["passed"] for check in same)
    assert sum(row["arm"] == OURS for row in report.arms) == 3
