"""Progress: silent when quick, sparse in a log, one display on a terminal, never on stdout."""

import os
import pty
import subprocess
import sys

import pytest

from lmsmith.display import progress as module
from lmsmith.display.progress import progress, track


class Clock:
    now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_quick_work_says_nothing(clock, capsys):
    assert list(track(range(5), "counting")) == list(range(5))
    assert capsys.readouterr() == ("", "")


def test_a_log_gets_few_lines_with_the_time_left(clock, capsys):
    with progress("reading", 100, done=20, unit="items") as task:
        for _ in range(80):
            clock.now += 1
            task.advance()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "reading: 25 of 100 items after 5 s, about 1 min 15 s left",
        "reading: 55 of 100 items after 35 s, about 45 s left",
        "reading: 85 of 100 items after 1 min 5 s, about 15 s left",
        "reading: 100 of 100 items, done after 1 min 20 s",
    ]


def test_work_that_counts_nothing_shows_no_count(clock, capsys):
    with progress("opening X"):
        clock.now += 9
    assert capsys.readouterr().err == "opening X, done after 9 s\n"
    with progress("opening X", 4):
        clock.now += 9
    assert capsys.readouterr().err == "opening X: 0 of 4, done after 9 s\n"


def test_work_that_fails_is_not_called_done(clock, capsys):
    with pytest.raises(RuntimeError), progress("fetching") as task:
        clock.now += 7200
        task.update(3)
        raise RuntimeError
    assert capsys.readouterr().err.splitlines()[-1] == "fetching: 3, stopped after 2 h 0 min"


def test_on_a_terminal_nested_bars_share_one_display_and_leave_nothing_behind():
    code = (
        "import time\n"
        "from lmsmith.display.progress import progress, track\n"
        "with progress('outer', 3) as outer:\n"
        "    for _ in track(range(3), 'inner', unit='bytes'):\n"
        "        time.sleep(0.15); outer.advance()\n"
        "with progress('unknown length') as task: task.advance(2048)\n"
        "print('result')\n"
    )
    main, terminal = pty.openpty()
    process = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        stdout=subprocess.PIPE,
        stderr=terminal,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
        timeout=60,
    )
    os.close(terminal)
    drawn = b""
    try:
        while chunk := os.read(main, 65536):
            drawn += chunk
    except OSError:
        pass  # the terminal's other end is closed: everything is read
    finally:
        os.close(main)
    text = drawn.decode()
    assert process.returncode == 0, text
    assert process.stdout == b"result\n"
    assert "outer" in text
    assert "inner" in text
    assert "Traceback" not in text
    assert text.rstrip().endswith(("\x1b[2K", "\x1b[?25h")) or "\x1b[2K" in text[-200:]


def test_importing_the_display_is_light():
    code = (
        "import sys, lmsmith.display.theme, lmsmith.display.tables, lmsmith.display.progress, "
        "lmsmith.display.figures, lmsmith.evaluation.bench, lmsmith.evaluation.items\n"
        "heavy = {'rich', 'matplotlib', 'torch', 'transformers', 'datasets'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
