"""The bench runner: what is measured once stays measured, and the report says what was found."""

import json

import numpy as np
import pytest

from lmsmith.errors import ConfigError, UnknownNameError, UsageError
from lmsmith.evaluation import experiment
from lmsmith.evaluation.bench import Bench, Item, benches, declare, find_bench, plan, run_bench
from lmsmith.evaluation.items import number_items
from lmsmith.evaluation.report import Report
from lmsmith.evaluation.runs import RunFolder
from lmsmith.evaluation.stats import mean_interval, paired_bootstrap

ITEMS = number_items({"n": n} for n in range(10))
CONFIG = {"method": "toy", "size": "smoke", "models": ["a", "b"], "seed": 3, "options": {}}


@pytest.fixture
def begin(tmp_path):
    """Open the same run again and again, each time as a new session would."""
    folders = []

    def begin() -> Bench:
        while folders:
            folders.pop().close()
        folders.append(RunFolder.open(tmp_path / "run", CONFIG))
        return Bench(folders[0])

    yield begin
    while folders:
        folders.pop().close()


class Counting:
    """Scores n / 7 and remembers what it was asked."""

    def __init__(self, limit: int = 1000):
        self.asked: list[list[str]] = []
        self.limit = limit

    def __call__(self, batch):
        if len(self.asked) == self.limit:
            raise RuntimeError("out of luck")
        self.asked.append([item.id for item in batch])
        return [{"x": item["n"] / 7, "note": np.int64(item["n"])} for item in batch]


def test_scores_come_back_in_order_and_are_not_computed_twice(begin):
    expected = [{"x": n / 7, "note": n} for n in range(10)]
    first, second = Counting(), Counting()
    assert begin().run("arm", ITEMS, first, batch_size=4) == expected
    assert [len(batch) for batch in first.asked] == [4, 4, 2]
    assert begin().run("arm", ITEMS, second, batch_size=4) == expected
    assert not second.asked


def test_after_a_failure_only_what_is_lacking_is_scored_in_the_same_batches(begin):
    with pytest.raises(RuntimeError):
        begin().run("arm", ITEMS, Counting(limit=2), batch_size=4)
    again = Counting()
    begin().run("arm", ITEMS, again, batch_size=4)
    assert again.asked == [["8", "9"]]


def test_a_batch_that_was_kept_in_part_is_scored_whole(begin):
    begin().run("arm", ITEMS, Counting(), batch_size=4)
    path = begin().folder.path / "items.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:6]) + lines[6][:9])
    again = Counting()
    assert len(begin().run("arm", ITEMS, again, batch_size=4)) == 10
    assert again.asked == [["4", "5", "6", "7"], ["8", "9"]]
    assert len(path.read_bytes().splitlines()) == 10


def test_results_are_kept_apart_by_section_arm_and_content(begin):
    bench = begin()
    for arm, section in [("a", ""), ("b", ""), ("a", "s")]:
        scorer = Counting()
        bench.run(arm, ITEMS, scorer, section=section)
        assert len(scorer.asked) == 10
    changed = Counting()
    bench.run("a", [Item("0", {"n": 5}), *ITEMS[1:]], changed)
    assert changed.asked == [["0"]]


def test_arms_that_share_work_are_scored_in_one_call(begin):
    calls = []

    def score(batch):
        calls.append(len(batch))
        return [{"low": {"x": item["n"]}, "high": {"x": 2 * item["n"]}} for item in batch]

    found = begin().arms(["low", "high"], ITEMS, score, batch_size=5)
    assert calls == [5, 5]
    assert [row["x"] for row in found["high"]] == [2 * row["x"] for row in found["low"]]
    single = Counting()
    begin().run("low", ITEMS, single)  # the same place on disk
    assert not single.asked


def test_what_is_kept_is_on_disk_before_the_call_ends(begin, monkeypatch):
    monkeypatch.setattr(experiment, "FLUSH_SECONDS", 0.0)
    bench = begin()
    seen = []

    def score(batch):
        seen.append(bench.folder.count())
        return [{"x": 0} for _ in batch]

    bench.run("arm", ITEMS, score, batch_size=3)
    assert seen == [0, 3, 6, 9]


def test_a_scorer_with_a_wrong_count_or_two_items_of_one_name_is_refused(begin):
    with pytest.raises(ValueError, match="0 scores for 1 items"):
        begin().run("arm", ITEMS, lambda batch: [])
    with pytest.raises(UsageError, match="two items are named"):
        begin().run("arm", [ITEMS[0], ITEMS[0]], Counting())


def test_a_measurement_is_made_once(begin):
    assert begin().once("a", lambda: (1, np.float64(2))) == [1, 2.0]
    assert begin().once("a", lambda: pytest.fail("measured twice")) == [1, 2.0]


def test_work_that_takes_its_time_says_so_once(begin, capsys, monkeypatch):
    from lmsmith.display import progress

    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    bench = begin()
    bench.once("training", lambda: 1)
    assert capsys.readouterr().err.startswith(f"{bench.method} training: ")
    bench.once("training", lambda: 1)
    assert capsys.readouterr().err == ""
    bench.interleaved("speed", {"a": lambda: None}, repeats=1)
    lines = capsys.readouterr().err.splitlines()
    assert lines and all(line.startswith(f"{bench.method} speed: ") for line in lines)
    assert len([line for line in lines if "done after" in line]) == 1


def test_interleaved_work_takes_turns(begin):
    order = []
    work = {name: (lambda name=name: order.append(name)) for name in "abc"}
    found = begin().interleaved("speed", work, repeats=3)
    assert order == [*"abc", *"bca", *"cab", *"abc"]  # the first round warms up
    assert {name: len(seconds) for name, seconds in found.items()} == dict.fromkeys("abc", 3)
    assert begin().interleaved("speed", work, repeats=3) == found
    assert len(order) == 12


def test_seeds_differ_by_name_and_stay(begin):
    bench = begin()
    seeds = {bench.seed_for("arm", n) for n in range(100)}
    assert len(seeds) == 100
    assert begin().seed_for("arm", 7) in seeds
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_a_table_holds_means_ratios_and_costs(begin):
    bench = begin()
    rng = np.random.default_rng(0)
    plain, mine = rng.gamma(2, 1, 50), rng.gamma(1, 1, 50)
    found = bench.table(
        "English",
        "surprise",
        "bits a byte",
        {"plain": plain, "mine": mine},
        baseline="plain",
        cost={"mine": {"calls": 2.0}},
    )
    assert found["plain"].ratio is None
    assert found["mine"].mean == mean_interval(mine)
    assert found["mine"].ratio == paired_bootstrap(mine, plain, "ratio")
    assert found["mine"].difference == paired_bootstrap(mine, plain, "difference")
    row = bench.report().to_dict()["arms"][1]
    assert row["arm"] == "mine"
    assert row["items"] == 50
    assert row["value"] == pytest.approx(mine.mean())
    assert row["low"] < row["value"] < row["high"]
    assert row["ratio"]["value"] == pytest.approx(mine.sum() / plain.sum())
    assert row["cost"] == {"calls": 2.0}
    with pytest.raises(ValueError, match="not among the arms"):
        bench.table("", "m", "", {"a": [1.0]}, baseline="b")
    with pytest.raises(ValueError, match="one number an item"):
        bench.table("", "m", "", {"a": [1.0, 2.0], "b": [1.0]}, baseline="a")


@pytest.mark.parametrize(
    ("value", "relation", "bar", "passed"),
    [
        (0.5, "<=", 0.5, True),
        (0.51, "<=", 0.5, False),
        (1, ">=", 1.0, True),
        (0.0, "==", 0, True),
        (1e-12, "==", 0, False),
        (0, "<", 0, False),
        (1, ">", 0, True),
        (True, "==", True, True),
        ("stop", "==", "stop", True),
        (None, "<=", 1, False),
        (float("nan"), ">=", 0, False),
        (float("inf"), "<=", 1, False),
        (np.float32(0.25), "<=", 0.25, True),
    ],
)
def test_a_check_passes_or_misses_and_never_raises(begin, value, relation, bar, passed):
    bench = begin()
    assert bench.check("holds", value, bar, relation, "identity", "why") is passed
    report = bench.report()
    assert report.passed is passed
    (check,) = json.loads(json.dumps(report.to_dict()["checks"], allow_nan=False))
    assert check["passed"] is passed
    assert check["source"] == "identity"
    assert check["note"] == "why"


def test_an_unknown_relation_is_refused(begin):
    with pytest.raises(ValueError, match="relation is one of"):
        begin().check("x", 1, 1, "≈")


@declare(
    models={"smoke": ["m"], "small": ["m", "n"]},
    options={"smoke": {"cuts": 20, "rate": 0.5, "texts": "english", "peers": False}},
)
def toy(bench: Bench) -> None:
    """A bench that misses one check on request."""
    bench.run("arm", ITEMS, Counting())
    bench.check("rate", bench.options["rate"], 0.5)


def test_run_bench_writes_a_whole_report_and_gives_it_back(tmp_path):
    report = run_bench("toy", out=tmp_path / "run", bench=toy)
    assert report.passed
    stored = json.loads((tmp_path / "run" / "report.json").read_text())
    assert stored == report.to_dict()
    contract = {"method", "size", "model", "arms", "checks", "environment", "seconds"}
    assert set(stored) == contract | {"settings", "figures"}
    assert stored["model"] == "m"
    environment = stored["environment"]
    assert environment["cores"] >= 1
    assert environment["cpu"]
    assert environment["versions"]["numpy"] == np.__version__

    @declare(toy.models, toy.options)
    def unwanted(bench: Bench) -> None:
        pytest.fail("ran again")

    again = run_bench("toy", out=tmp_path / "run", bench=unwanted)
    assert again == Report.load(tmp_path / "run")


def test_a_missed_bar_is_reported_not_raised(tmp_path):
    report = run_bench("toy", out=tmp_path / "run", bench=toy, options={"rate": 0.75})
    assert not report.passed
    assert "miss" in report.to_markdown()


def test_a_failed_bench_resumes_by_itself_under_the_default_base(tmp_path):
    def broken(bench: Bench) -> None:
        bench.run("arm", ITEMS, Counting(limit=5))

    with pytest.raises(RuntimeError, match="out of luck"):
        run_bench("toy", base=tmp_path, bench=broken)

    def mended(bench: Bench) -> None:
        scorer = Counting()
        bench.run("arm", ITEMS, scorer)
        bench.check("calls", len(scorer.asked), 5, "==")

    report = run_bench("toy", base=tmp_path, bench=mended)
    assert report.passed
    assert len(list(tmp_path.iterdir())) == 1


def test_a_plan_resolves_every_setting():
    found = plan("toy", "smoke", bench=toy, options={"cuts": "30", "rate": 1, "peers": "true"})
    assert found == {
        "method": "toy",
        "size": "smoke",
        "models": ["m"],
        "seed": 0,
        "options": {"cuts": 30, "rate": 1.0, "texts": "english", "peers": True},
    }
    assert plan("toy", "small", bench=toy)["models"] == ["m", "n"]
    assert plan("toy", "full", bench=toy)["models"] == []
    assert plan("toy", "smoke", ["x"], bench=toy, options={"texts": "7"})["models"] == ["x"]


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (UnknownNameError, "did you mean 'small'", {"size": "smal"}),
        (UnknownNameError, "did you mean 'cuts'", {"options": {"cut": 3}}),
        (ConfigError, "'cuts' is a whole number, not 'many'", {"options": {"cuts": "many"}}),
        (ConfigError, "'cuts' is a whole number, not 2.5", {"options": {"cuts": 2.5}}),
        (ConfigError, "'cuts' is a whole number, not True", {"options": {"cuts": True}}),
        (ConfigError, "'rate' is a number, not 'x'", {"options": {"rate": "x"}}),
        (ConfigError, "'texts' is text, not 3", {"options": {"texts": 3}}),
    ],
)
def test_a_wrong_setting_is_one_line(error, message, arguments):
    with pytest.raises(error, match=message) as caught:
        plan("toy", bench=toy, **arguments)
    assert "\n" not in str(caught.value)


def test_registered_benches_are_found():
    assert {"session", "byte-sampler"} <= set(benches())
    with pytest.raises(UnknownNameError, match="did you mean 'byte-sampler'"):
        find_bench("byte-samplr")


def test_a_model_is_opened_once_and_named_in_the_report(begin, tmp_path):
    torch = pytest.importorskip("torch")
    from lmsmith.testing.models import tiny_lm

    tiny = tiny_lm()
    folder = tmp_path / "tiny"
    tiny.model.save_pretrained(folder)
    tiny.tokenizer.save_pretrained(folder)
    bench = begin()
    before = torch.get_num_threads()
    try:
        lm = bench.model(str(folder), dtype="float32")
        assert bench.model(str(folder), dtype="float32") is lm
        assert torch.get_num_threads() == bench.folder.measurements["threads"]
    finally:
        torch.set_num_threads(before)
    facts = bench.report().environment["models"]
    assert facts == {str(folder): {"dtype": "float32", "device": str(lm.device)}}
