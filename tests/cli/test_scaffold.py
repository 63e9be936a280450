"""A throw-away method in a temporary folder shows up everywhere and passes its own test."""

import os
import shutil
import subprocess
import sys

import pytest

from lmsmith import cards, scaffold
from lmsmith.errors import StorageError, UsageError


def passes(folder):
    """Run a scaffold's own test, as its author would."""
    environment = {k: v for k, v in os.environ.items() if k != cards.FOLDERS_VARIABLE}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", folder.name],
        cwd=folder.parent,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


@pytest.fixture
def made(lmsmith, methods):
    done = lmsmith("new", "throw-away-one", "--dir", methods, "--json")
    assert done.document == {"name": "throw-away-one", "folder": str(methods / "throw_away_one")}
    return methods / "throw_away_one"


def test_what_to_do_next_can_be_copied_from_the_screen(start, tmp_path, monkeypatch):
    monkeypatch.delenv(cards.FOLDERS_VARIABLE, raising=False)
    home = tmp_path / ("a long way " * 8)
    home.mkdir()
    out, err = start("new", "one", cwd=home).communicate(timeout=60)
    place = f"'{home / 'one'}'"
    assert err == b"" and f"  export LMSMITH_METHODS={place}\n" in out.decode()
    assert out.decode().endswith("Its test: python -m pytest one\n")
    monkeypatch.setenv(cards.FOLDERS_VARIABLE, str(home / "one"))
    out, _ = start("new", "two", cwd=home).communicate(timeout=60)
    assert "  export LMSMITH_METHODS=$LMSMITH_METHODS:'" in out.decode()
    monkeypatch.setenv(cards.FOLDERS_VARIABLE, str(home))
    out, _ = start("copy", "one", "three", cwd=home).communicate(timeout=60)
    assert out.decode().startswith("Method three is in the folder ") and b"export" not in out


def test_a_new_method_passes_its_own_test(made):
    passes(made)


def test_a_new_method_knows_nothing_of_the_template(made):
    files = [path for path in made.rglob("*") if path.is_file()]
    assert {"card.toml", "decoder.py", "test_throw_away_one.py"} <= {path.name for path in files}
    for path in files:
        assert "template" not in path.read_text("utf-8").lower(), path


def test_a_new_method_is_in_list_info_generate_and_bench(lmsmith, made, tiny, tmp_path):
    assert "throw-away-one" in lmsmith("list").out
    info = lmsmith("info", "throw-away-one", "--json").document
    assert [row["name"] for row in info["settings"]] == ["factor"]
    assert lmsmith("throw-away-one", "temperature", "0.8").out == "0.4\n"

    run = ("generate", tiny, "the cat", "--max-tokens", 8, "--seed", 1)
    cold = lmsmith(*run, "--method", "throw-away-one", "--factor", 0)
    assert (cold.code, cold.err) == (0, "")
    assert cold.out == lmsmith(*run, "--temperature", 0).out
    wrong = lmsmith(*run, "--method", "throw-away-one", "--facter", 0)
    assert wrong.code == 2 and "Did you mean --factor?" in wrong.line

    assert "throw-away-one" in lmsmith("bench").out
    bench = ("bench", "throw-away-one", "--model", tiny, "--out", tmp_path / "run")
    report = lmsmith(*bench, "--json").document
    assert {row["arm"] for row in report["arms"]} == {"plain", "throw-away-one"}
    assert all(check["passed"] for check in report["checks"])
    again = lmsmith(*bench, "--json")
    assert (again.code, again.document) == (0, report)
    assert "finished" in lmsmith("runs", tmp_path).out
    [run] = lmsmith("runs", tmp_path, "--json").document
    assert (run["folder"], run["passed"]) == (str(tmp_path / "run"), 1)
    page = lmsmith("report", tmp_path / "run", "--out", tmp_path / "RESULTS.md")
    assert page.code == 0
    assert "throw-away-one" in (tmp_path / "RESULTS.md").read_text()


def test_a_copy_of_a_method_lives_under_its_own_name(lmsmith, made, methods):
    done = lmsmith("copy", "throw-away-one", methods / "my_copy", "--json")
    assert done.document["name"] == "my-copy"
    assert {"throw-away-one", "my-copy"} <= set(cards.find())
    assert lmsmith("my-copy", "temperature", "1").out == "0.5\n"
    assert cards.get("my-copy").load("decoder").__module__ == "my_copy.decoder"


def test_a_copy_of_every_built_in_method_loads_from_its_folder(lmsmith, methods):
    for card in list(cards.find().values()):
        if card.origin != "built-in":
            continue
        assert lmsmith("copy", card.name, methods / f"my_{card.folder.name}").code == 0
        copied = cards.get(f"my-{card.name}")
        for kind in copied.entry:
            assert copied.load(kind) is not card.load(kind)
        for path in copied.folder.rglob("*.py"):
            assert f"lmsmith.methods.{card.folder.name}" not in path.read_text("utf-8")


def test_a_new_method_inside_the_package_is_built_in(monkeypatch, tmp_path):
    monkeypatch.setattr(cards, "BUILT_IN", tmp_path)
    folder = scaffold.new("a-tenant", tmp_path)
    assert cards.get("a-tenant").entry["bench"] == "lmsmith.methods.a_tenant.bench:bench"
    assert "from lmsmith.methods.a_tenant.config" in (folder / "test_a_tenant.py").read_text()


def test_nothing_is_overwritten(lmsmith, made):
    shutil.rmtree(made)
    made.mkdir()
    done = lmsmith("new", "throw-away-one", "--dir", made.parent)
    assert done.code == 2
    assert "is there already" in done.line
    assert list(made.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot write"):
        scaffold.new("a-tenant", tmp_path / "file")
    with pytest.raises(UsageError, match="there is already a method"):
        scaffold.new("byte-sampler", tmp_path)
