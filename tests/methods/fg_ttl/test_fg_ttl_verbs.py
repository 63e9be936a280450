"""`lmsmith fg-ttl ...` as a user types it."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from lmsmith.cli.main import main
from lmsmith.testing import tiny_lm


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    lm = tiny_lm()
    lm.model.save_pretrained(folder)
    lm.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def stream(tmp_path):
    path = tmp_path / "stream.jsonl"
    rows = [{"id": f"q{n}", "prompt": f"There were {n} of them"} for n in range(5)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows) + "{broken\n")
    return path


@pytest.fixture
def run(capsys):
    def call(*words):
        capsys.readouterr()
        code = main(["fg-ttl", *map(str, words)])
        done = capsys.readouterr()
        return code, done.out, done.err

    return call


FEW = ("--max-new-tokens", 12, "--stream-batch", 2, "--learning-rate", 0.01)


def test_run_answers_logs_and_goes_on(run, model, stream, tmp_path):
    out = tmp_path / "run"
    code, text, told = run("run", model, stream, *FEW, "--out", out)
    assert code == 0, told
    assert [line.split()[0] for line in text.splitlines() if line.startswith("[q")] == [
        f"[q{n}]" for n in range(5)
    ]
    assert "item 5 skipped: the line is not JSON" in told and "3 batches" in told
    code, text, told = run("run", model, stream, *FEW, "--out", out, "--json")
    found = json.loads(text)
    assert [one["id"] for one in found["answers"]] == ["q0", "q1", "q2", "q3", "q4", "5"]
    assert found["settings"]["learning_rate"] == 0.01
    code, text, _ = run("log", out, "--json")
    rows = json.loads(text)
    assert [row["answered"] for row in rows] == [2, 2, 1]
    assert "Learned" not in run("log", out)[1]


def test_a_preset_a_file_and_options_in_that_order(run, model, stream, tmp_path):
    (tmp_path / "own.toml").write_text('alpha = 0.25\nobjective = "tent"\n')
    code, text, told = run(
        "run", model, stream, "--preset", "official_code", "--config", tmp_path / "own.toml",
        "--objective", "sar", "--tau", 0.8, "--dry-run",
    )  # fmt: skip
    assert code == 0, told
    settings = json.loads(text)["settings"]
    assert (settings["guard"], settings["too_long"]) == (False, "cut")
    assert (settings["alpha"], settings["objective"], settings["tau"]) == (0.25, "sar", 0.8)
    code, text, _ = run("run", model, stream, "--no-guard", "--dry-run")
    assert json.loads(text)["settings"]["guard"] is False


def test_select_shows_what_would_be_learned_from(run, model):
    code, text, told = run("select", model, "There were", "--max-new-tokens", 40, "--json")
    assert code == 0, told
    rows = json.loads(text)
    chosen = [row for row in rows if row["selected"]]
    assert chosen and sum(row["weight"] for row in chosen) == pytest.approx(1)
    assert all(row["temperature"] > 1 for row in chosen)
    assert all(row["weight"] is None for row in rows if not row["selected"])


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["run", "MODEL", "nowhere.txt"], "nowhere.txt"),
        (["run", "MODEL", "STREAM", "--top-p", "3"], "top_p"),
        (["run", "MODEL", "STREAM", "--objectiv", "tent"], "objective"),
        (["run", "MODEL", "STREAM", "--objective", "tend"], "tent"),
        (["run", "MODEL", "STREAM", "--mode", "offline"], "offline"),
        (["run", "MODEL", "STREAM", "--targets", "nothing"], "nothing"),
        (["run", "MODEL"], "STREAM"),
        (["rum", "MODEL", "STREAM"], "run"),
        (["select", "MODEL", "text", "--objective", "tlm"], "tlm"),
        (["select", "MODEL", " "], "empty"),
        (["log", "nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_one_line(run, model, stream, tmp_path, words, part):
    names = {"MODEL": model, "STREAM": stream}
    code, text, told = run(*[names.get(word, word) for word in words])
    lines = [line for line in told.splitlines() if not line.startswith("opening ")]
    assert (code, text, len(lines)) == (2, "", 1), told
    assert part in lines[0]


def test_a_run_that_is_stopped_says_how_to_go_on(model, tmp_path):
    stream = tmp_path / "long.txt"
    stream.write_text("\n".join(f"There were {n} of them" for n in range(4000)))
    words = [str(w) for w in ("run", model, stream, *FEW, "--out", tmp_path / "run")]
    child = subprocess.Popen(
        [sys.executable, "-m", "lmsmith", "fg-ttl", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    log = tmp_path / "run" / "items.jsonl"
    deadline = time.monotonic() + 120
    while not (log.exists() and log.read_bytes().count(b"\n") >= 2):
        assert time.monotonic() < deadline and child.poll() is None
        time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    _, told = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "run the same command again" in told.decode().splitlines()[-1]
