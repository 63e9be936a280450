"""Progress on standard error: a bar on a terminal, a sparse line in a log, nothing when quick.

Not for: results; those go to standard output.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import ProgressColumn

T = TypeVar("T")

# Work shorter than this says nothing in a log; a longer one speaks at most this often.
QUIET_SECONDS = 5.0
EVERY_SECONDS = 30.0

_lock = threading.Lock()
_bars: Bars | None = None
_users = 0


class Task:
    """One piece of work whose progress is shown; made by `progress`.

    Attributes:
        note: What else to say about it now, such as a loss.
    """

    def __init__(self, title: str, total: float | None, done: float, unit: str) -> None:
        self.title, self.total, self.done, self.unit = title, total, done, unit
        self.note = ""
        self._before = done
        self._started = self._spoke = time.monotonic()

    def advance(self, amount: float = 1) -> None:
        """Count `amount` more units as done."""
        self.update(self.done + amount)

    def update(self, done: float, total: float | None = None) -> None:
        """Set how much is done, and the total where it became known."""
        self.done = done
        if total is not None:
            self.total = total
        self._show()

    def _show(self) -> None:
        now = time.monotonic()
        wait = QUIET_SECONDS if self._spoke == self._started else EVERY_SECONDS
        if now - self._spoke >= wait:
            self._spoke = now
            self._say(now)

    def _say(self, now: float, end: str = "") -> None:
        unit = f" {self.unit}" if self.unit else ""
        count = ""
        if self.done or self.total:
            count = f": {self.done:,.0f}{f' of {self.total:,.0f}' if self.total else ''}{unit}"
        seconds = now - self._started
        rate = (self.done - self._before) / seconds if seconds else 0.0
        left = (
            f", about {_duration((self.total - self.done) / rate)} left"
            if self.total and rate > 0 and not end
            else ""
        )
        note = f", {self.note}" if self.note else ""
        sys.stderr.write(f"{self.title}{count}{end} after {_duration(seconds)}{left}{note}\n")
        sys.stderr.flush()

    def _close(self, failed: bool) -> None:
        now = time.monotonic()
        if now - self._started >= QUIET_SECONDS:
            self._say(now, ", stopped" if failed else ", done")


class _BarTask(Task):
    """The same on a terminal, drawn by rich."""

    def __init__(self, bars: Bars, title: str, total: float | None, done: float, unit: str) -> None:
        super().__init__(title, total, done, unit)
        self._bars = bars
        self._id = bars.add_task(title, total=total, unit=unit, left="left" if total else "")
        bars.update(self._id, completed=done)

    def _show(self) -> None:
        title = f"{self.title}  {self.note}" if self.note else self.title
        self._bars.update(self._id, completed=self.done, total=self.total, description=title)

    def _close(self, failed: bool) -> None:
        self._bars.remove_task(self._id)


@contextmanager
def progress(
    title: str, total: float | None = None, *, done: float = 0, unit: str = ""
) -> Iterator[Task]:
    """Show the progress of the work inside the `with` block.

    Blocks may nest; on a terminal they share one display.

    Args:
        title: What is being done, in a few words.
        total: How many units there are; `None` when it is not known.
        done: Units that were done before (a resumed run).
        unit: What is counted; `bytes` is shown as a size.
    """
    bars = _enter() if sys.stderr.isatty() else None
    task = Task(title, total, done, unit)
    if bars is not None:
        task = _BarTask(bars, title, total, done, unit)
    failed = True
    try:
        yield task
        failed = False
    finally:
        task._close(failed)
        if bars is not None:
            _leave()


def track(
    items: Iterable[T], title: str, total: float | None = None, unit: str = ""
) -> Iterator[T]:
    """Yield `items` one by one and show how far along they are."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    with progress(title, total, unit=unit) as task:
        for item in items:
            yield item
            task.advance()


def _enter() -> Bars:
    global _bars, _users  # noqa: PLW0603 - a terminal has one live display
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from lmsmith.display.theme import console

    with _lock:
        if _bars is None:
            _bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=30),
                _count_column(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("[quiet]{task.fields[left]}"),
                console=console(stderr=True),
                transient=True,
            )
            _bars.start()
        _users += 1
        return _bars


def _leave() -> None:
    global _bars, _users  # noqa: PLW0603
    with _lock:
        _users -= 1
        if not _users and _bars is not None:
            _bars.stop()
            _bars = None


def _count_column() -> ProgressColumn:
    from rich.filesize import decimal
    from rich.progress import ProgressColumn
    from rich.progress import Task as BarTask
    from rich.text import Text

    class Count(ProgressColumn):
        def render(self, task: BarTask) -> Text:
            if not task.completed and not task.total:
                return Text()
            unit = task.fields.get("unit", "")
            show = decimal if unit == "bytes" else "{:,}".format
            text = show(int(task.completed))
            if task.total:
                text += f" of {show(int(task.total))}"
            return Text(text if unit in ("", "bytes") else f"{text} {unit}", style="number")

    return Count()


def _duration(seconds: float) -> str:
    """`7 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
