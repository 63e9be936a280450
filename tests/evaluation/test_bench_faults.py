"""A bench that is killed, stopped or out of luck ends in the same report."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TOY = Path(__file__).with_name("toy_bench.py")
ALIVE = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}


def start(folder: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(TOY), str(folder)],
        env={**os.environ, **ALIVE},
        stderr=subprocess.PIPE,
        text=True,
    )


def outcome(folder: Path) -> dict:
    """The report without what differs from run to run: times and revisions."""
    report = json.loads((folder / "report.json").read_text())
    del report["seconds"]
    for key in ("finished", "revision", "revisions"):
        del report["environment"][key]
    return report


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert start(folder).wait() == 0
    return folder


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_random_points_gives_the_same_report(undisturbed, tmp_path, seed):
    rng = random.Random(seed)
    folder, kills, rows = tmp_path / "run", 0, [0]

    def begun() -> int:
        config = folder / "config.json"
        return config.stat().st_mtime_ns if config.exists() else 0

    while not (folder / "report.json").exists():
        assert kills < 20, "no progress between kills"
        before, process = begun(), start(folder)
        while begun() == before and process.poll() is None:
            time.sleep(0.005)  # kills fall into the work, not into imports
        try:
            process.wait(rng.uniform(0.0, 0.3 + 0.5 * kills))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            kills += 1
        items = folder / "items.jsonl"
        rows.append(items.read_bytes().count(b"\n") if items.exists() else 0)
    assert kills >= 1
    assert rows == sorted(rows)  # nothing that was kept is lost
    assert outcome(folder) == outcome(undisturbed)
    figure = "figures/loss.png"
    assert (folder / figure).read_bytes() == (undisturbed / figure).read_bytes()

    def lines(path: Path) -> list[str]:
        return sorted((path / "items.jsonl").read_text("utf-8", "surrogatepass").split("\n"))

    assert lines(folder) == lines(undisturbed)  # and nothing is there twice


def test_stopped_with_ctrl_c_says_how_to_go_on_and_does(undisturbed, tmp_path):
    folder = tmp_path / "run"
    process = start(folder)
    while not (folder / "items.jsonl").exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, message = process.communicate(timeout=60)
    assert process.returncode == 130, message
    assert message.count("\n") == 1
    kept = (folder / "items.jsonl").read_bytes().count(b"\n")
    assert f"stopped; {kept} results are kept in {folder}" in message
    assert "run the same command again" in message
    assert not (folder / "report.json").exists()
    assert start(folder).wait() == 0
    assert outcome(folder) == outcome(undisturbed)
