"""`lmsmith bench` as a user runs it: plan, report, exit code, Ctrl-C and resume."""

import json
import signal
import time

import pytest

CARD = """
name = "toy-bench"
purpose = "Measures nothing, slowly."
[entry]
bench = "toy_bench_method.bench:bench"
"""
BENCH = """
import time
from lmsmith.evaluation.bench import declare
from lmsmith.evaluation.items import number_items

SIZES = ("smoke", "small", "full")

@declare(options={size: {"items": 40, "pause": 0.0, "bar": 0.5} for size in SIZES})
def bench(bench):
    items = number_items({"value": i / 40} for i in range(bench.options["items"]))

    def score(batch):
        time.sleep(bench.options["pause"])
        return [{"value": item["value"]} for item in batch]

    rows = bench.run("arm", items, score)
    values = [row["value"] for row in rows]
    bench.table("all", "value", "units", {"arm": values})
    bench.check("mean", sum(values) / len(values), bench.options["bar"], "<=", source="toy")
"""


@pytest.fixture
def toy(methods):
    folder = methods / "toy_bench_method"
    folder.mkdir()
    (folder / "card.toml").write_text(CARD)
    (folder / "bench.py").write_text(BENCH)
    return folder


def without_times(report):
    del report["seconds"]
    return report["arms"], report["checks"], report["settings"]["options"]


def test_a_met_bar_is_exit_0_and_a_missed_one_exit_1(lmsmith, toy, tmp_path):
    met = lmsmith("bench", "toy-bench", "--out", tmp_path / "met")
    assert met.code == 0
    assert "pass" in met.out and str(tmp_path / "met") in met.out.replace("\n", "")
    missed = lmsmith("bench", "toy-bench", "--out", tmp_path / "missed", "--option", "bar=0.1")
    assert missed.code == 1
    assert missed.err == "" and "miss" in missed.out
    report = lmsmith(
        "bench", "toy-bench", "--out", tmp_path / "missed", "--option", "bar=0.1", "--json"
    )
    assert report.code == 1
    assert [check["passed"] for check in report.document["checks"]] == [False]
    compared = lmsmith("runs", tmp_path / "met", tmp_path / "missed")
    assert compared.code == 0
    assert "met" in compared.out and "missed" in compared.out


def test_a_plan_is_printed_and_nothing_is_run(lmsmith, toy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("--size", "small", "--seed", 3, "--model", "a", "--model", "b", "--option", "items=7")
    document = lmsmith("bench", "toy-bench", *words, "--dry-run").document
    assert document["size"] == "small"
    assert (document["seed"], document["models"], document["options"]["items"]) == (
        3,
        ["a", "b"],
        7,
    )
    assert not (tmp_path / "runs").exists()
    assert "did you mean 'items'" in lmsmith("bench", "toy-bench", "--option", "item=7").line


def test_benches_are_listed_with_what_they_measure(lmsmith, toy):
    rows = {row["name"]: row["purpose"] for row in lmsmith("bench", "--json").document}
    assert rows["toy-bench"] == "Measures nothing, slowly."
    assert {"byte-sampler", "session"} <= set(rows)


def test_ctrl_c_is_one_line_and_the_same_command_goes_on(start, lmsmith, toy, tmp_path):
    command = ("bench", "toy-bench", "--out", tmp_path / "run", "--option", "pause=0.1", "--json")
    child = start(*command)
    items = tmp_path / "run" / "items.jsonl"
    for _ in range(600):
        if items.exists() and items.read_bytes().count(b"\n") >= 3:
            break
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out) == (130, b"")
    assert err.count(b"\n") == 1 and b"run the same command again" in err
    kept = items.read_text().splitlines()
    assert 3 <= len(kept) < 40

    resumed = lmsmith(*command)
    assert resumed.code == 0
    assert items.read_text().splitlines()[: len(kept)] == kept
    fresh = lmsmith(*command[:3], tmp_path / "fresh", *command[4:])
    assert without_times(resumed.document) == without_times(fresh.document)
    assert json.loads((tmp_path / "run" / "report.json").read_text())["checks"][0]["passed"]
