"""What a number was measured on."""

import json
import shutil
import subprocess
import sys

import pytest

from lmsmith.evaluation import environment as module
from lmsmith.evaluation.environment import environment, fastest_threads
from lmsmith.models.doctor import usable_cores


def test_the_environment_is_json_and_does_not_import_torch():
    code = (
        "import json, sys\n"
        "from lmsmith.evaluation.environment import environment\n"
        "found = environment()\n"
        "assert 'torch' not in sys.modules and 'threads' not in found\n"
        "print(json.dumps(found))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["cores"] == usable_cores() >= 1
    assert found["cpu"]
    assert found["versions"]["lmsmith"]
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))


def test_threads_are_told_once_torch_is_there():
    torch = pytest.importorskip("torch")
    assert environment()["threads"] == torch.get_num_threads()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_revision_is_the_packages_own_not_a_neighbours(tmp_path, monkeypatch):
    """A copy that is installed inside somebody else's repository has no revision."""

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    home = tmp_path / "src" / "pkg"
    home.mkdir(parents=True)
    copy = home / "environment.py"
    copy.write_text("x = 1\n")
    (tmp_path / "other").touch()
    git("add", "other")
    git("commit", "-qm", "other")
    monkeypatch.setattr(module, "__file__", str(copy))

    def revision() -> str | None:
        module.revision.cache_clear()
        return module.revision()

    try:
        assert revision() is None
        git("add", "src")
        git("commit", "-qm", "package")
        assert revision() == git("rev-parse", "--short=12", "HEAD")
        copy.write_text("x = 2\n")
        assert revision() == git("rev-parse", "--short=12", "HEAD") + "-dirty"
    finally:
        module.revision.cache_clear()


def test_the_thread_count_is_one_that_was_tried_and_leaves_torch_alone(monkeypatch):
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert fastest_threads(repeats=1) in (1, usable_cores(), before)
    assert torch.get_num_threads() == before
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert fastest_threads() == before
