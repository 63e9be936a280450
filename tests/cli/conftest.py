import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lmsmith import cards
from lmsmith.cli.main import main


@dataclass
class Done:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)

    @property
    def line(self) -> str:
        """The one line of an error; fails when there is more, or anything else."""
        assert self.out == ""
        assert self.err.count("\n") == 1 and self.err.endswith("\n"), self.err
        return self.err.rstrip("\n")


@pytest.fixture
def lmsmith(capsys, monkeypatch):
    """Run a command in this process."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*words: object) -> Done:
        capsys.readouterr()
        code = main([str(word) for word in words])
        out, err = capsys.readouterr()
        return Done(code, out, err)

    return run


@pytest.fixture
def start():
    """Start a command in a process of its own."""
    started = []

    def run(*words: object, cwd: Path | None = None) -> subprocess.Popen:
        child = subprocess.Popen(
            [sys.executable, "-m", "lmsmith", *map(str, words)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        started.append(child)
        return child

    yield run
    for child in started:
        child.kill()
        child.communicate()


@pytest.fixture
def methods(tmp_path, monkeypatch):
    """An empty folder of methods that is searched."""
    folder = tmp_path / "methods"
    folder.mkdir()
    monkeypatch.setenv(cards.FOLDERS_VARIABLE, str(folder))
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A folder with a tiny model, as any user's local model."""
    from lmsmith.testing import tiny_lm

    folder = tmp_path_factory.mktemp("model") / "tiny"
    lm = tiny_lm("llama")
    lm.model.save_pretrained(folder)
    lm.tokenizer.save_pretrained(folder)
    return folder
