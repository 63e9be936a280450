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


ROWS = 3 * 64


def count(folder: Path) -> int:
    items = folder / "items.jsonl"
    return items.read_bytes().count(b"\n") if items.exists() else 0


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_random_points_gives_the_same_report(undisturbed, tmp_path, seed):
    rng, folder = random.Random(seed), tmp_path / "run"
    kept = [0]
    late_kills = 0  # while tables, checks and figures are made
    while not (folder / "report.json").exists():
        process = start(folder)
        if kept[-1] < ROWS:
            target = kept[-1] + rng.randint(1, 60)
            while count(folder) < min(target, ROWS) and process.poll() is None:
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.05))
            process.kill()
        elif late_kills < 2:
            late_kills += 1
            time.sleep(rng.uniform(0.3, 1.5))
            process.kill()
        process.wait()
        kept.append(count(folder))
    assert kept == sorted(kept)  # nothing that was kept is lost
    assert any(0 < rows < ROWS for rows in kept)  # a kill fell into the middle
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
    assert f"stopped; {count(folder)} results are kept in {folder}" in message
    assert "run the same command again" in message
    assert not (folder / "report.json").exists()
    assert start(folder).wait() == 0
    assert outcome(folder) == outcome(undisturbed)
