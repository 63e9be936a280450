"""Reports as Markdown, collected and compared."""

import json
import re

import pytest

from lmsmith.errors import UsageError
from lmsmith.evaluation.bench import Bench, run_bench
from lmsmith.evaluation.items import number_items
from lmsmith.evaluation.report import Report, collect, compare, list_runs, runs_table
from lmsmith.evaluation.runs import RunFolder

ITEMS = number_items({"n": n} for n in range(12))


def make_bench(factor: float):
    def bench(state: Bench) -> None:
        plain = [1.0 + n / 10 for n in range(12)]
        mine = [factor * value for value in plain]
        state.run("plain", ITEMS, lambda batch: [{"x": 1} for _ in batch])
        found = state.table(
            "English", "surprise", "bits a byte", {"plain": plain, "mine": mine}, baseline="plain"
        )
        ratio = found["mine"].ratio
        state.check("fewer bits", ratio.value, 0.5, "<=", "paper, table 2", "small | model")
        state.figure("bits", "Half the bits", {arm: f.mean for arm, f in found.items()})

    return bench


@pytest.fixture
def results(tmp_path):
    root = tmp_path / "results"
    for name, factor in [("one", 0.25), ("two", 0.75)]:
        run_bench(name, out=root / name, bench=make_bench(factor))
    return root


def test_a_report_survives_the_disk(results):
    report = Report.load(results / "one")
    again = Report.load(results / "one" / "report.json")
    assert report == again
    assert json.loads((results / "one" / "report.json").read_text()) == report.to_dict()


def test_markdown_holds_what_was_measured(results):
    text = Report.load(results / "two").to_markdown()
    assert text.startswith("# two: smoke\n")
    assert "**English: surprise, bits a byte**" in text
    assert re.search(
        r"\| mine \| 1\.16 \[[\d.]+, [\d.]+\] \| 0\.750 \[0\.750, 0\.750\] \| 12 \|", text
    )
    assert "lower is better" in text
    assert "| miss | fewer bits | 0.750 | <= 0.500 | paper, table 2 | small \\| model |" in text
    assert "![Half the bits](figures/bits.png)" in text
    assert "seed 0" in text


def test_collect_writes_one_page_whose_links_lead_somewhere(results, tmp_path):
    page = collect([results], tmp_path / "docs" / "RESULTS.md")
    text = page.read_text()
    assert text.index("## one: smoke") < text.index("## two: smoke")
    assert "| one | smoke |  | 1 of 1 |" in text
    assert "| two | smoke |  | 0 of 1 |" in text
    links = re.findall(r"\]\(([^)]+\.png)\)", text)
    assert len(links) == 2
    for link in links:
        assert (page.parent / link).read_bytes().startswith(b"\x89PNG")
    collect([results], page)
    assert page.read_text() == text


def test_collect_shows_the_newest_of_the_same_bench(results, tmp_path):
    old = json.loads((results / "one" / "report.json").read_text())
    old["environment"]["finished"] = "2001-01-01T00:00:00+00:00"
    old["checks"][0]["note"] = "outdated"
    (results / "zero").mkdir()
    (results / "zero" / "report.json").write_text(json.dumps(old))
    text = collect([results], tmp_path / "RESULTS.md").read_text()
    assert text.count("## one: smoke") == 1
    assert "outdated" not in text


def test_collect_names_what_is_wrong(results, tmp_path):
    with pytest.raises(UsageError, match="no folder"):
        collect([tmp_path / "nowhere"], tmp_path / "a.md")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no report under"):
        collect([tmp_path / "empty"], tmp_path / "a.md")
    (results / "one" / "report.json").write_text('{"method": "one"')
    with pytest.raises(UsageError, match="is not a bench report"):
        collect([results], tmp_path / "a.md")


def test_runs_are_listed_with_their_state(results, tmp_path):
    config = {"method": "one", "size": "small", "models": ["a", "b"], "seed": 0, "options": {}}
    RunFolder.open(results / "stopped", config).close()
    with RunFolder.open(results / "working", config) as folder:
        folder.append([{"a": 1}])
        described = list_runs(results)
    states = {run["folder"].rpartition("/")[2]: run for run in described}
    assert {name: run["state"] for name, run in states.items()} == {
        "one": "finished",
        "two": "finished",
        "stopped": "unfinished",
        "working": "running",
    }
    assert states["working"]["rows"] == 1
    assert states["working"]["model"] == "a+b"
    assert (states["one"]["passed"], states["two"]["passed"]) == (1, 0)
    assert "1 of 1" in runs_table(described).markdown()
    assert list_runs(tmp_path / "nowhere") == []


def test_compare_puts_runs_side_by_side(results):
    arms, checks = (table.markdown() for table in compare([results / "one", results / "two"]))
    assert "| arm | one | two |" in arms
    assert re.search(r"\| mine \| 0\.388 \[.*\] \| 1\.16 \[.*\] \|", arms)
    assert "| fewer bits | 0.250 pass | 0.750 miss |" in checks
    with pytest.raises(UsageError, match="has no finished report"):
        compare([results])
