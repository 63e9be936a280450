"""`list`, `info`, `models`, `doctor`, `runs` and help: everything that only shows something."""

import os
import platform
from importlib.metadata import version

import pytest

from lmsmith import cards
from lmsmith.cli.main import COMMANDS
from lmsmith.models import known


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_help_names_every_command_and_method(lmsmith, words):
    done = lmsmith(*words)
    assert done.code == 0
    for name in [*COMMANDS, *(n for n, card in cards.find().items() if "cli" in card.entry)]:
        assert f"\n  {name} " in done.out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_every_command_is_explained(lmsmith, name):
    done = lmsmith(name, "--help")
    assert (done.code, done.err) == (0, "")
    assert "--json" in done.out
    import inspect

    from docstring_parser import parse

    from lmsmith.cli.main import _function

    function = _function(COMMANDS[name][0])
    explained = {p.arg_name for p in parse(function.__doc__).params}
    assert explained == set(inspect.signature(function).parameters)


def test_help_shows_the_order_of_words_and_only_defaults_that_say_something(lmsmith):
    out = lmsmith("generate", "--help").out
    assert out.startswith("Usage: lmsmith generate MODEL [PROMPT] [OPTIONS]\n")
    assert "[default: 1.0]" in out and "[default: 0]" in out
    assert lmsmith("runs", "--help").out.startswith("Usage: lmsmith runs [FOLDERS]... [OPTIONS]\n")
    models, pull = lmsmith("models", "--help").out, lmsmith("models", "pull", "--help").out
    assert models.startswith("Usage: lmsmith models [COMMAND] [OPTIONS]\n")
    assert pull.startswith("Usage: lmsmith models pull NAME [OPTIONS]\n")
    for text in (out, models, pull):
        assert "False" not in text and "None" not in text


def test_list_and_info_tell_what_the_card_says(lmsmith):
    [row] = [row for row in lmsmith("list", "--json").document if row["name"] == "byte-sampler"]
    assert row == cards.get("byte-sampler").to_dict()
    info = lmsmith("info", "byte-sampler", "--json").document
    assert info["paper"]["arxiv"] == "2506.14123"
    assert {"name", "default", "type", "unit", "meaning", "source"} == set(info["settings"][0])
    shown = " ".join(lmsmith("info", "byte-sampler").out.split())
    for row in info["settings"]:
        assert row["name"] in shown and " ".join(row["source"].split()) in shown
    for lines in info["sources"].values():
        assert all(line in shown for line in lines)


def test_list_names_families_and_origins(lmsmith, methods):
    (methods / "mine").mkdir()
    (methods / "mine" / "card.toml").write_text('name = "mine-own"\npurpose = "Nothing."\n')
    out = lmsmith("list").out
    assert "byte-sampler" in out and "mine-own" in out
    assert "No methods" not in out


def test_info_of_a_method_without_settings(lmsmith, methods):
    (methods / "mine").mkdir()
    (methods / "mine" / "card.toml").write_text(
        'name = "mine-own"\npurpose = "Nothing [at] all."\n'
    )
    done = lmsmith("info", "mine-own")
    assert done.code == 0
    assert "mine-own: Nothing [at] all." in done.out


def test_models_tells_where_each_comes_from(lmsmith):
    rows = {row["name"]: row for row in lmsmith("models", "--json").document}
    assert set(rows) >= {
        "smollm2-135m",
        "gemma-3-270m",
        "qwen2.5-coder-0.5b",
        "qwen2.5-coder-1.5b",
        "minilm",
    }
    assert all(row["licence"] for row in rows.values())
    assert lmsmith("models").out.count("smollm2-135m") == 1
    assert lmsmith("models", "list", "--json").document == list(rows.values())


def test_models_remove_takes_one_model_off_the_disk(lmsmith, tmp_path, monkeypatch):
    monkeypatch.setenv("LMSMITH_CACHE", str(tmp_path))
    kept, gone = (known.KNOWN[name].folder for name in ("smollm2-135m", "minilm"))
    for folder in (kept, gone):
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(b"0" * 1000)
    assert lmsmith("models", "remove", "minilm").out == "removed minilm\n"
    assert not gone.exists() and (kept / "weights").exists()
    done = lmsmith("models", "remove", "minilm")
    assert (done.code, done.out, done.err) == (0, "minilm was not on disk\n", "")
    document = lmsmith("models", "remove", "smollm2-135m", "--json").document
    assert document == {"name": "smollm2-135m", "removed": True}
    document = lmsmith("models", "remove", "smollm2-135m", "--json").document
    assert document == {"name": "smollm2-135m", "removed": False}
    wrong = lmsmith("models", "remove", "minilmm")
    assert wrong.code == 2 and "did you mean 'minilm'?" in wrong.line


def test_doctor_tells_what_is_installed_and_what_the_machine_has(lmsmith, tmp_path, monkeypatch):
    monkeypatch.setenv("LMSMITH_CACHE", str(tmp_path / "not" / "yet"))
    done = lmsmith("doctor", "--json")
    found = {check["what"]: check["found"] for check in done.document["checks"]}
    wrong = {check["what"] for check in done.document["checks"] if not check["ok"]}
    assert wrong <= {"model cache"}  # whose disk may be full where this runs
    assert (done.code, done.document["ready"]) == ((3, False) if wrong else (0, True))
    assert found["python"] == platform.python_version()
    # What is installed without being asked for is no matter of the doctor.
    for name in ("torch", "transformers", "numpy", "cyclopts", "matplotlib"):
        assert found[name] == version(name)
    assert not {"pytest", "ruff", "datasets"} & set(found)
    assert f"{len(os.sched_getaffinity(0))} cores usable" in found["processor"]
    total, available = (float(part.split()[0]) for part in found["memory"].split(", "))
    assert 0 < available <= total
    assert found["model cache"].startswith(f"{tmp_path / 'not' / 'yet'}, ")
    assert found["methods"].split(", ") == list(cards.find())
    assert not (tmp_path / "not").exists()


def test_doctor_names_a_missing_package_with_the_line_that_installs_it(lmsmith, monkeypatch):
    from importlib import metadata

    needed = metadata.requires("lmsmith")
    monkeypatch.setattr(metadata, "requires", lambda _: [*needed, "no-such-package>=2.0"])
    done = lmsmith("doctor", "--json")
    assert done.code == 3 and not done.document["ready"]
    [row] = [check for check in done.document["checks"] if check["what"] == "no-such-package"]
    assert (row["found"], row["ok"]) == ("missing", False)
    assert row["hint"] == "python -m pip install 'no-such-package>=2.0'"


def test_doctor_finds_a_method_that_cannot_be_loaded(lmsmith, methods):
    (methods / "ill").mkdir()
    (methods / "ill" / "card.toml").write_text(
        'name = "ill-method"\npurpose = "Nothing."\n[entry]\nbench = "ill.bench:bench"\n'
    )
    done = lmsmith("doctor")
    assert done.code == 3
    assert "Not ready" in done.out and "No module named 'ill.bench'" in " ".join(done.out.split())


def test_doctor_finds_a_cache_that_cannot_be_made(lmsmith, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LMSMITH_CACHE", str(tmp_path / "file" / "cache"))
    done = lmsmith("doctor")
    assert done.code == 3
    assert "LMSMITH_CACHE" in done.out


def test_runs_and_report_of_nothing(lmsmith, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert lmsmith("runs", "--json").document == []
    done = lmsmith("runs")
    assert (done.code, done.out) == (0, "") and "no runs in the folder runs" in done.err
    (tmp_path / "results").mkdir()
    done = lmsmith("report")
    assert done.code == 2 and "no report under results" in done.line
