"""`lmsmith byte-sampler ...` as a user types it."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.real_model


def run(*words, text=None):
    return subprocess.run(
        [sys.executable, "-m", "lmsmith", "byte-sampler", *words],
        capture_output=True,
        text=True,
        input=text,
        timeout=240,
        check=False,
    )


def test_score_prints_bits_a_byte():
    done = run("score", "smollm2-135m", "The capital of France is Paris.", "--json")
    assert done.returncode == 0, done.stderr
    [found] = json.loads(done.stdout)
    assert found["bytes"] == 31 == len(found["byte_logprobs"])
    assert abs(sum(found["byte_logprobs"]) - found["logprob_nats"]) < 1e-3
    assert 0 < found["bits_per_byte"] < 2


def test_a_model_beside_itself_is_scored_twice_and_together():
    half = "caf\udcc3"  # how a shell's half character arrives
    done = run("score", "smollm2-135m+smollm2-135m", half, "--combine", "product", "--json")
    assert done.returncode == 0, done.stderr
    one, other, both = json.loads(done.stdout)
    assert one == other and both["model"] == "product"
    assert one["bytes"] == 4
    assert abs(both["logprob_nats"] - one["logprob_nats"]) < 1e-4


def test_a_prompt_may_end_inside_a_character():
    command = [sys.executable, "-m", "lmsmith", "generate", "smollm2-135m", "Un caf\udcc3"]
    done = subprocess.run(
        [*command, "--method", "byte-sampler", "--temperature", "0", "--max-tokens", "4", "--json"],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    [completion] = json.loads(done.stdout)["completions"]
    assert completion["text"].startswith("é")


def test_tree_shows_trunk_and_heads():
    done = run("tree", "smollm2-135m", "an unfini", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for head in found["heads"]:
        spelled = "".join(found["trunk"]) + "".join(head["branch"]) + head["walked"]
        assert spelled == "an unfini"
    assert any(head["walked"] == "" for head in found["heads"])


def test_check_finds_nothing_wrong():
    done = run("check", "smollm2-135m", "--pairs", "500", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["wrong pairs"] == 0


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["score", "smollm2-135m", ""], "empty"),
        (["score", "smollm2-135m", "--file", "nowhere.txt"], "nowhere.txt"),
        (["score", "smolm2-135m", "text"], "smollm2-135m"),
        (["tree", "minilm", "text"], "WordPiece"),
        (["scor", "smollm2-135m", "text"], "score"),
    ],
)
def test_mistakes_are_one_line(words, part):
    done = run(*words)
    assert done.returncode == 2, done.stderr
    assert part in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""
