"""Everything a user can get wrong is one line and the right exit code."""

import os
import signal
import subprocess
import sys

import pytest

CARD = """
name = "{name}"
purpose = "A throw-away."
[entry]
{entry}
"""
VERBS = """
import sys
from cyclopts import App
app = App(name="throw-away", help="Throw-away verbs.")

@app.command
def shout(word: str, times: int = 1): sys.stdout.write(word.upper() * times + "\\n")

@app.command
def fail(): {}["key"]

@app.command
def stop(): raise KeyboardInterrupt

@app.command
def pour():
    for number in range(10**6): sys.stdout.write(f"{number}\\n")

@app.command
def sleep():
    import time
    sys.stdout.write("asleep\\n"); sys.stdout.flush(); time.sleep(60)
"""


@pytest.fixture
def verbs(methods):
    folder = methods / "throw_away_verbs"
    folder.mkdir()
    entry = 'cli = "throw_away_verbs.cli:app"'
    (folder / "card.toml").write_text(CARD.format(name="throw-away", entry=entry))
    (folder / "cli.py").write_text(VERBS)
    return folder


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["lisst"], 2, "unknown command 'lisst'; did you mean 'list'?"),
        (["list", "--jsn"], 2, "unknown option: --jsn. Did you mean --json?"),
        (["list", "extra"], 2, "list does not take 'extra' as well; see lmsmith list --help"),
        (["info"], 2, "METHOD is missing; see lmsmith info --help"),
        (["copy", "byte-sampler"], 2, "FOLDER is missing; see lmsmith copy --help"),
        (["models", "pull"], 2, "NAME is missing; see lmsmith models pull --help"),
        (["byte-sampler", "score"], 2, "MODEL is missing; see lmsmith byte-sampler score --help"),
        (["generate", "m", "p", "--seed"], 2, "--seed needs a value; see lmsmith generate --help"),
        (
            ["info", "byte-smapler"],
            2,
            "unknown method 'byte-smapler'; did you mean 'byte-sampler'?",
        ),
        (["models", "pul"], 2, "unknown models command 'pul'; did you mean 'pull'?"),
        (["models", "pull", "smolm2-135m"], 2, "did you mean 'smollm2-135m'?"),
        (["bench", "byte-smapler"], 2, "did you mean 'byte-sampler'?"),
        (["bench", "session", "--size", "smal"], 2, "unknown size 'smal'; did you mean 'small'?"),
        (["bench", "session", "--seed", "x"], 2, 'invalid value for --seed: unable to convert "x"'),
        (["bench", "session", "--option", "x"], 2, "--option 'x' must be NAME=VALUE"),
        (["runs", "no-such-folder"], 2, "no folder no-such-folder"),
        (["report", "no-such-folder"], 2, "no folder no-such-folder"),
        (["generate", "m"], 2, "give either a PROMPT"),
        (["generate", "m", "p", "--prompts", "f"], 2, "give either a PROMPT"),
        (["generate", "m", "--prompts", "no-such-file"], 2, "no-such-file cannot be read"),
        (["generate", "m", "p", "--temprature", "1"], 2, "Did you mean --temperature?"),
        (["generate", "m", "p", "--temperature", "hot"], 2, 'unable to convert "hot" into float'),
        (["generate", "m", "p", "--temperature", "-1"], 2, "temperature is -1.0, but"),
        (["generate", "m", "p", "--top-k", "-1"], 2, "top_k is -1, but"),
        (["generate", "m", "p", "--top-p", "2"], 2, "top_p is 2.0, but"),
        (["generate", "m", "p", "--min-p", "-0.1"], 2, "min_p is -0.1, but"),
        (["generate", "m", "p", "--max-tokens", "0"], 2, "--max-tokens is 0, but"),
        (["generate", "m", "p", "--batch-size", "0"], 2, "--batch-size is 0, but"),
        (["generate", "m", "p", "--threads", "0"], 2, "--threads is 0, but"),
        (["generate", "m", "p", "--stop="], 2, "--stop is empty"),
        (["generate", "m", "p", "--config", "c.toml"], 2, "give --method as well"),
        (["generate", "m", "p", "--method", "byte-smapler"], 2, "did you mean 'byte-sampler'?"),
        (["generate", "a+b", "p"], 2, "a+b names 2 models; add --method"),
        (["generate", "a+", "p"], 2, "has an empty part"),
        (
            ["generate", "a+b", "p", "--method", "byte-sampler", "--adapter", "x"],
            2,
            "--adapter goes",
        ),
        (
            ["generate", "m", "p", "--method", "byte-sampler", "--mod", "x"],
            2,
            "Did you mean --mode?",
        ),
        (["generate", "m", "p", "--method", "byte-sampler", "--mode", "byte"], 2, '"bytes"'),
        (
            ["generate", "m", "p", "--method", "byte-sampler", "--token-top-k=-1"],
            2,
            "setting 'token_top_k' is -1, but must be greater than or equal to 0",
        ),
        (["new", "Foo"], 2, "'Foo' cannot name a method"),
        (["new", "json"], 2, "'json' is taken by Python itself"),
        (["new", "byte-sampler"], 2, "there is already a method 'byte-sampler'"),
        (["copy", "byte-smapler", "x"], 2, "did you mean 'byte-sampler'?"),
        (["copy", "byte-sampler", "My-Copy"], 2, "'My-Copy' cannot name a package"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_usage_is_one_line(lmsmith, words, code, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = lmsmith(*words)
    assert done.code == code
    assert done.line.startswith("error: ")
    assert message in done.line


def test_an_unknown_model_names_the_nearest(lmsmith):
    done = lmsmith("generate", "smolm2-135m", "x")
    assert done.code in (1, 2)
    assert "smollm2-135m" in done.line


@pytest.mark.parametrize(
    ("spec", "code", "message"),
    [
        ("./nomodel", 1, "there is no folder ./nomodel; give a model folder or a hub id"),
        ("foo/bar-", 1, "there is no folder foo/bar-; give"),
        ("foo/..", 1, "there is no folder foo/..; give"),
        ("foo/bar.git", 1, "there is no folder foo/bar.git; give"),
        ("~nouser/x", 1, "there is no folder ~nouser/x; give"),
        ("~nouser", 2, "unknown model '~nouser'; known: "),
        ("a" * 300, 2, "unknown model 'aaa"),
        ("a/" + "b" * 300, 1, "there is no folder a/bbb"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_what_can_be_no_model_is_one_line_without_asking_the_hub(start, spec, code, message):
    child = start("generate", spec, "x")
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out, err.count(b"\n")) == (code, b"", 1), err
    assert err.decode().startswith(f"error: {message}")


def test_a_wrong_config_file_names_the_file_and_the_nearest_key(lmsmith, tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text("alhpa = 1.0\n")
    done = lmsmith("generate", "m", "p", "--method", "byte-sampler", "--config", path)
    assert done.code == 2
    assert done.line == f"error: {path}: unknown setting 'alhpa'; did you mean 'alpha'?"


def test_a_card_that_is_wrong_is_one_line(lmsmith, methods):
    (methods / "wrong").mkdir()
    (methods / "wrong" / "card.toml").write_text('naem = "x"\n')
    done = lmsmith("list")
    assert done.code == 2
    assert "unknown key 'naem'; did you mean 'name'?" in done.line


def test_a_method_without_text_is_refused(lmsmith, verbs):
    done = lmsmith("generate", "m", "p", "--method", "throw-away")
    assert done.code == 2
    assert "does not generate text" in done.line


def test_a_missing_module_is_exit_3(lmsmith, methods):
    folder = methods / "needs_much"
    folder.mkdir()
    entry = 'bench = "needs_much.bench:bench"'
    (folder / "card.toml").write_text(CARD.format(name="needs-much", entry=entry))
    (folder / "bench.py").write_text("import no_such_module_at_all\n")
    done = lmsmith("bench", "needs-much")
    assert done.code == 3
    assert "no_such_module_at_all" in done.line


def test_verbs_of_a_method(lmsmith, verbs):
    assert lmsmith("throw-away", "shout", "hey", "--times", "2").out == "HEYHEY\n"
    done = lmsmith("throw-away", "shuot", "hey")
    assert done.code == 2
    assert done.line == "error: unknown throw-away command 'shuot'; did you mean 'shout'?"


def test_a_lone_dash_reaches_a_verb_as_it_is(lmsmith, verbs):
    assert lmsmith("throw-away", "shout", "-").out == "-\n"


def test_an_unexpected_failure_is_one_line_and_debug_shows_where(lmsmith, verbs):
    done = lmsmith("throw-away", "fail")
    assert done.code == 1
    assert done.line == "error: unexpected KeyError: 'key'; run again with --debug"
    done = lmsmith("throw-away", "fail", "--debug")
    assert done.code == 1
    assert "Traceback" in done.err and 'def fail(): {}["key"]' in done.err


def test_debug_shows_where_a_user_error_comes_from(lmsmith):
    done = lmsmith("--debug", "info", "nothing-like-it")
    assert done.code == 2
    assert "Traceback" in done.err
    assert done.err.rstrip().splitlines()[-1].startswith("error: unknown method")


def test_stopping_is_exit_130(lmsmith, verbs):
    done = lmsmith("throw-away", "stop")
    assert (done.code, done.line) == (130, "stopped")


def test_ctrl_c_in_a_real_process_is_one_line(start, verbs):
    child = start("throw-away", "sleep")
    assert child.stdout.readline() == b"asleep\n"
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=30)
    assert (child.returncode, out, err) == (130, b"", b"stopped\n")


def test_a_reader_that_goes_away_is_no_error(start, verbs):
    child = start("throw-away", "pour")
    assert child.stdout.readline() == b"0\n"
    child.stdout.close()
    assert child.stderr.read() == b""
    assert child.wait(timeout=30) in (0, 1)


def test_the_installed_command_and_module_are_the_same():
    script = os.path.join(os.path.dirname(sys.executable), "lmsmith")
    for command in ([script], [sys.executable, "-m", "lmsmith"]):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
        assert done.stdout.startswith("lmsmith 0.")
