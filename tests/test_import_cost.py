"""Start-up is a feature: what only shows something must not wait for torch."""

import os
import subprocess
import sys

import pytest

BUDGET_SECONDS = 0.3
HEAVY = ("torch", "transformers", "numpy", "matplotlib", "pandas", "datasets", "peft")

MAIN = "import sys; from lmsmith.cli.main import main; code = main({words!r})"
CASES = {
    "import": "import lmsmith; code = 0",
    "help": MAIN.format(words=["--help"]),
    "list": MAIN.format(words=["list"]),
    "models": MAIN.format(words=["models"]),
    "wrong command": MAIN.format(words=["lisst"]),
}


def child(code: str) -> tuple[float, str]:
    """CPU seconds, user and system, of a fresh interpreter, and what it wrote."""
    before = os.times()
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    after = os.times()
    assert run.returncode == 0, run.stderr
    spent = after.children_user - before.children_user
    return spent + after.children_system - before.children_system, run.stdout


@pytest.mark.parametrize("case", CASES)
def test_start_up_stays_within_its_budget(case):
    child(CASES[case])  # compiles what is not compiled yet
    # A neighbour on the same core makes CPU seconds longer, never shorter: the least is the cost.
    best = BUDGET_SECONDS
    for _ in range(12):
        best = min(best, child(CASES[case])[0])
        if best < BUDGET_SECONDS:
            return
    pytest.fail(f"at least {BUDGET_SECONDS} CPU seconds, twelve times")


@pytest.mark.parametrize("case", CASES)
def test_start_up_imports_nothing_heavy(case):
    code = f"{CASES[case]}\nimport sys; print('LOADED', *sorted(set(sys.modules) & set({HEAVY!r})))"
    assert child(code)[1].rstrip().endswith("LOADED")


def test_every_public_name_is_there_when_it_is_asked_for():
    import lmsmith

    assert all(callable(getattr(lmsmith, name)) for name in lmsmith.__all__)
    assert set(lmsmith.__all__) <= set(dir(lmsmith))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = lmsmith.nothing


def test_the_version_is_the_installed_one():
    from importlib.metadata import version

    import lmsmith

    assert version("lmsmith") == lmsmith.__version__
