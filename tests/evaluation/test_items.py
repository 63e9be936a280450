"""Items from files: what is read is what was written, and what is wrong is named."""

import csv
import json
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmsmith.errors import DataSourceError, MissingDependencyError, UsageError
from lmsmith.evaluation.items import Item, check_unique, load_items, number_items

fields = st.dictionaries(
    st.sampled_from(["question", "gold", "页"]),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    min_size=1,
)


@given(st.lists(fields, max_size=5))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_json_lines_round_trip(tmp_path, rows):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    assert load_items(path) == number_items(rows)


@given(st.lists(st.tuples(*[st.text("ab,\"'\n页 ", min_size=1)] * 3), max_size=5))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_csv_without_a_header_round_trips(tmp_path, rows):
    path = tmp_path / "a.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    items = load_items(path, columns=["question", "options", "gold"])
    assert [tuple(item.fields.values()) for item in items] == rows
    assert all(list(item.fields) == ["question", "options", "gold"] for item in items)


def test_csv_with_a_header_limit_and_names(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("name,text\nx,1\ny,2\nz,3\n", encoding="utf-8-sig")
    items = load_items(path, limit=2, id_field="name")
    assert [item.id for item in items] == ["x", "y"]
    assert items[1]["text"] == "2"


def test_parquet_round_trips(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"text": "页", "n": 1}, {"text": "b", "n": 2}]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "a.parquet"))
    assert load_items(tmp_path / "a.parquet") == number_items(rows)
    (tmp_path / "b.parquet").write_text("not parquet")
    with pytest.raises(UsageError, match="is not a parquet file"):
        load_items(tmp_path / "b.parquet")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', "line 2 is not JSON"),
        ("a.jsonl", b'{"a": 1}\n[1]\n', "line 2 is not a JSON object"),
        ("a.jsonl", b'{"a": "\xff"}\n', "is not UTF-8"),
        ("a.csv", b"a,b\n1,2\n1\n", "line 3 has 1 columns, expected 2"),
        ("a.csv", b"a,b\n\xff,2\n", "is not UTF-8"),
        ("a.txt", b"text", "is not a .jsonl, .csv or .parquet file"),
    ],
)
def test_a_broken_file_is_named_in_one_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        load_items(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_missing_things_are_named(tmp_path):
    with pytest.raises(UsageError, match="no file"):
        load_items(tmp_path / "none.jsonl")
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(UsageError, match="has no field 'name'"):
        load_items(tmp_path / "a.jsonl", id_field="name")
    with pytest.raises(UsageError, match="two items are named 'x'"):
        check_unique([Item("x"), Item("x")])


def test_a_hub_that_does_not_answer_is_told_within_ten_seconds(monkeypatch):
    pytest.importorskip("datasets")
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # the discard port
    started = time.monotonic()
    with pytest.raises(DataSourceError, match="could not be loaded") as caught:
        load_items("nobody/no-such-data-set")
    assert time.monotonic() - started < 10
    assert "\n" not in str(caught.value)
    assert constants.HF_HUB_OFFLINE is False


def test_without_the_extra_the_install_line_is_given(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(MissingDependencyError, match=r"lmsmith\[data\]"):
        load_items(tmp_path / "a.parquet")
