"""Run folders: what is written stays, whatever happens to the process."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmsmith.errors import RunFolderBusyError, StorageError, UsageError
from lmsmith.evaluation.runs import RunFolder, run_folders

CONFIG = {"method": "toy", "size": "smoke", "models": ["m"], "seed": 0, "options": {"cuts": 20}}
ROWS = [{"item": str(n), "scores": {"x": n / 7, "text": "页\n\udc80"}} for n in range(5)]


def test_rows_and_measurements_are_read_back_as_they_were_returned(tmp_path):
    with RunFolder.open(tmp_path / "run", CONFIG) as folder:
        assert not folder.resumed
        kept = folder.append([{"a": np.float64(0.1), "b": np.arange(3), "c": float("inf")}])
        value = folder.measure("times", (np.float32(0.5), 1))
        folder.append(ROWS)
    with RunFolder.open(tmp_path / "run", CONFIG) as again:
        assert again.resumed
        assert again.rows == kept + ROWS
        assert kept == [{"a": 0.1, "b": [0, 1, 2], "c": float("inf")}]
        assert again.measurements == {"times": value} == {"times": [0.5, 1]}


@given(cut=st.integers(0, 10_000))
@settings(
    max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
def test_a_file_cut_anywhere_loses_only_what_was_not_whole(tmp_path, cut):
    path = tmp_path / "run"
    (path / "items.jsonl").unlink(missing_ok=True)
    with RunFolder.open(path, CONFIG) as folder:
        folder.append(ROWS)
    blob = (path / "items.jsonl").read_bytes()
    torn = blob[: cut % (len(blob) + 1)]
    (path / "items.jsonl").write_bytes(torn)
    with RunFolder.open(path, CONFIG) as folder:
        whole = torn.count(b"\n")
        assert folder.rows == ROWS[:whole]
        folder.append(ROWS[whole:])
    assert (path / "items.jsonl").read_bytes() == blob


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    with RunFolder.open(tmp_path / "run", CONFIG) as folder:
        folder.append(ROWS)
    items = tmp_path / "run" / "items.jsonl"
    lines = items.read_bytes().split(b"\n")
    lines[1] = lines[1][:7]
    items.write_bytes(b"\n".join(lines))
    with pytest.raises(StorageError, match=r"items\.jsonl line 2 is damaged"):
        RunFolder.open(tmp_path / "run", CONFIG)


def test_leftovers_of_a_killed_write_are_swept_away(tmp_path):
    with RunFolder.open(tmp_path / "run", CONFIG) as folder:
        folder.measure("a", 1)
    (tmp_path / "run" / ".writing-measurements.json").write_text('{"a": 1, "b"')
    with RunFolder.open(tmp_path / "run", CONFIG) as folder:
        assert folder.measurements == {"a": 1}
    assert not list((tmp_path / "run").glob(".writing-*"))


def test_a_folder_killed_before_its_config_was_written_is_begun_anew(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").touch()
    (tmp_path / "run" / ".writing-config.json").write_text("{")
    with RunFolder.open(tmp_path / "run", CONFIG) as folder:
        assert not folder.resumed


def test_other_settings_are_refused_and_named(tmp_path):
    RunFolder.open(tmp_path / "run", CONFIG).close()
    other = {**CONFIG, "seed": 1, "options": {"cuts": 30}}
    with pytest.raises(UsageError) as caught:
        RunFolder.open(tmp_path / "run", other)
    message = str(caught.value)
    assert "seed: 0 there, 1 here" in message
    assert "options.cuts: 20 there, 30 here" in message
    assert "models" not in message
    assert "\n" not in message


def test_a_folder_with_something_else_in_it_is_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UsageError, match="is not a run folder"):
        RunFolder.open(tmp_path, CONFIG)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="a file of that name is there"):
        RunFolder.open(tmp_path / "file", CONFIG)


def test_without_a_name_the_newest_unfinished_run_of_the_same_settings_goes_on(tmp_path):
    def open_(config=CONFIG):
        return RunFolder.open(None, config, base=tmp_path)

    with open_() as first:
        assert first.path.parent == tmp_path
        assert first.path.name.startswith("toy-")
    with open_({**CONFIG, "seed": 1}) as other:
        assert other.path != first.path
    with open_() as again:
        assert again.path == first.path
        assert again.resumed
        again.finish({"done": True})
    assert not (first.path / ".lock").exists()
    with open_() as fresh:
        assert fresh.path not in (first.path, other.path)
        assert not fresh.resumed
    assert len(run_folders(tmp_path)) == 3


def test_two_processes_never_write_one_folder(tmp_path):
    with RunFolder.open(None, CONFIG, base=tmp_path) as first:
        with pytest.raises(RunFolderBusyError, match="another process is working in"):
            RunFolder.open(first.path, CONFIG)
        with RunFolder.open(None, CONFIG, base=tmp_path) as second:
            assert second.path != first.path
    RunFolder.open(first.path, CONFIG).close()  # free again


def test_sessions_are_recorded_and_their_time_adds_up(tmp_path):
    for _ in range(2):
        RunFolder.open(tmp_path / "run", CONFIG).close()
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    stored["sessions"][0]["seconds"] = 100.0
    (tmp_path / "run" / "config.json").write_text(json.dumps(stored))
    with RunFolder.open(tmp_path / "run", CONFIG) as folder:
        assert 100 <= folder.seconds < 130
        folder.finish({})
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert [set(session) for session in stored["sessions"]] == [
        {"started", "revision", "versions", "seconds"}
    ] * 3
    assert stored["sessions"][0]["versions"]["numpy"] == np.__version__


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path):
    path = tmp_path / "run"
    with RunFolder.open(path, CONFIG) as folder:
        folder.append(ROWS)
        folder.measure("a", 1)
        (path / "items.jsonl").rename(path / "kept")
        os.symlink("/dev/full", path / "items.jsonl")
        os.symlink("/dev/full", path / ".writing-measurements.json")
        for write in (lambda: folder.append(ROWS), lambda: folder.measure("b", 2)):
            with pytest.raises(StorageError, match="no space left on the disk") as caught:
                write()
            assert "\n" not in str(caught.value)
        assert folder.rows == ROWS
        (path / "kept").rename(path / "items.jsonl")
    with RunFolder.open(path, CONFIG) as folder:
        assert folder.rows == ROWS
        assert folder.measurements == {"a": 1}
