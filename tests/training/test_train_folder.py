"""A run's folder: what it saves others can read, and a killed run goes on to the same bits."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import peft
import pytest
import torch
from training_examples import SUMS, Recurrent, ids_of, same, weights
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmsmith.errors import RunFolderBusyError, UsageError
from lmsmith.files import lock_folder
from lmsmith.testing import FAMILIES, tiny_lm, tiny_model
from lmsmith.training import NextTokenLoss, train

HERE = Path(__file__).parent
TIMES = ("seconds",)


def without_times(log):
    return [{k: v for k, v in row.items() if k not in TIMES} for row in log]


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_reads_the_adapter_and_gives_equal_logits(family, tmp_path):
    lm = tiny_lm(family)
    settings = {"tune": "lora", "steps": 3, "learning_rate": 1e-2, "lora_dropout": 0.1}
    train(lm, SUMS, settings, out=tmp_path)
    base = tiny_model(family, vocabulary=len(lm.tokenizer))
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    ids = torch.tensor([[5, 9, 2, 33, 60, 1]])
    with torch.no_grad(), lm.adapter.at(1.0):
        mine = lm.model(ids).logits
    with torch.no_grad():
        assert torch.allclose(theirs(ids).logits, mine, atol=1e-5)
        with theirs.disable_adapter():
            assert (theirs(ids).logits - mine).abs().max() > 1e-3
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == lm.name and config["r"] == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_reads_the_model(dtype, tmp_path):
    lm = tiny_lm(dtype=dtype)
    train(lm, SUMS, {"steps": 2, "learning_rate": 1e-2}, out=tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert theirs.dtype == dtype
    assert same(weights(theirs), weights(lm.model))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.encode("the token") == lm.encode("the token")


def test_the_log_and_the_result(tmp_path):
    settings = {"steps": 4, "evaluate_every": 2}
    result = train(tiny_lm(), SUMS, settings, held_out=SUMS[:4], out=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert rows == result.log and [row["step"] for row in rows] == [1, 2, 3, 4]
    assert ["held_out" in row for row in rows] == [False, True, False, True]
    summary = json.loads((tmp_path / "result.json").read_text())
    assert summary["steps"] == 4 and summary["held_out"] == result.held_out


@pytest.mark.parametrize("kind", ["full", "lora", "module"])
def test_a_finished_run_is_read_back(kind, tmp_path):
    def start():
        return Recurrent() if kind == "module" else tiny_lm()

    def run(model):
        examples = ids_of((5, 9, 4)) if kind == "module" else SUMS
        settings = {"steps": 2, "tune": "lora" if kind == "lora" else "full"}
        return train(model, examples, settings, out=tmp_path)

    one, other = start(), start()
    first, again = run(one), run(other)
    assert again.log == first.log
    parts = [m if kind == "module" else m.adapter or m.model for m in (one, other)]
    assert same(weights(parts[0]), weights(parts[1]))


class Stop(Exception):
    pass


@pytest.mark.parametrize("kind", ["full", "lora", "module"])
def test_a_run_that_fails_goes_on_from_its_checkpoint_to_the_same_bits(kind, tmp_path):
    settings = {
        "steps": 9,
        "learning_rate": 1e-2,
        "schedule": "cosine",
        "warmup": 0.2,
        "batch_size": 4,
        "micro_batch_size": 3,
        "checkpoint_every": 2,
        "keep": 2,
        "tune": "lora" if kind == "lora" else "full",
        "lora_dropout": 0.2,
    }
    examples = ids_of((5, 9, 4, 8, 7)) if kind == "module" else SUMS

    def run(out, stop=None):
        model = Recurrent() if kind == "module" else tiny_lm()
        calls = 0

        def loss(module, batch):
            nonlocal calls
            calls += 1
            if calls == stop:
                raise Stop
            return default(module, batch)

        default = NextTokenLoss(model if kind == "module" else model.model)
        result = train(model, examples, settings, out=out, loss=loss)
        trained = model if kind == "module" else model.adapter or model.model
        return result.log, weights(trained)

    log, wanted = run(tmp_path / "whole")
    for stop in (12, 7):  # in step 6, then, resumed after step 4, in step 8
        with pytest.raises(Stop):
            run(tmp_path / "broken", stop)
    kept = sorted(p.name for p in (tmp_path / "broken" / "checkpoints").iterdir())
    assert kept == ["step-00000004", "step-00000006"]
    log_again, found = run(tmp_path / "broken")
    assert without_times(log_again) == without_times(log)
    assert same(wanted, found)


RESUME = """
import sys, torch
torch.set_num_threads(1)
from lmsmith.testing import tiny_lm
from lmsmith.training import train
from training_examples import SUMS
lm = tiny_lm()
train(lm, SUMS, {settings}, out=sys.argv[1])
"""


def test_killed_at_random_it_goes_on_to_the_same_bits(tmp_path):
    settings = {"steps": 60, "tune": "lora", "lora_dropout": 0.1, "checkpoint_every": 3}
    settings |= {"learning_rate": 1e-2, "schedule": "cosine", "seed": 3}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        whole = tiny_lm()
        log = train(whole, SUMS, settings, out=tmp_path / "whole").log
        out = tmp_path / "killed"
        draw = random.Random()
        process = subprocess.Popen(
            [sys.executable, "-c", RESUME.replace("{settings}", repr(settings)), str(out)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
        )
        after = draw.randint(3, 30)
        while process.poll() is None and lines(out) < after:
            time.sleep(0.002)
        time.sleep(draw.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (out / "result.json").exists()
        killed = tiny_lm()
        again = train(killed, SUMS, settings, out=out).log
    finally:
        torch.set_num_threads(threads)
    assert without_times(again) == without_times(log)
    assert same(weights(whole.adapter), weights(killed.adapter))


def lines(out):
    path = out / "log.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_a_folder_of_something_else_is_refused(tmp_path):
    train(Recurrent(), ids_of((5, 9)), {"steps": 1}, out=tmp_path / "run")
    with pytest.raises(UsageError, match="steps: 1 there, 2 here"):
        train(Recurrent(), ids_of((5, 9)), {"steps": 2}, out=tmp_path / "run")
    with pytest.raises(UsageError, match=r"data: .* there, .* here"):
        train(Recurrent(), ids_of((5, 8)), {"steps": 1}, out=tmp_path / "run")
    with pytest.raises(UsageError, match=r"model: Recurrent of .* there"):
        train(Recurrent(width=8), ids_of((5, 9)), {"steps": 1}, out=tmp_path / "run")
    # What it keeps and how often is its own affair.
    train(Recurrent(), ids_of((5, 9)), {"steps": 1, "keep": 5}, out=tmp_path / "run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("dear")
    with pytest.raises(UsageError, match="is not empty and holds no training run"):
        train(Recurrent(), ids_of((5, 9)), {"steps": 1}, out=tmp_path / "other")
    (tmp_path / "busy").mkdir()
    with lock_folder(tmp_path / "busy"), pytest.raises(RunFolderBusyError):
        train(Recurrent(), ids_of((5, 9)), {"steps": 1}, out=tmp_path / "busy")
