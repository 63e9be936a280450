"""`lmsmith bench`: run a method's experiment and show its tables and checks."""

from __future__ import annotations

from pathlib import Path

from lmsmith.display.console import show, show_json
from lmsmith.errors import UsageError


def bench(
    method: str | None = None,
    /,
    *,
    size: str = "smoke",
    model: list[str] | None = None,
    out: Path | None = None,
    seed: int = 0,
    option: list[str] | None = None,
    json: bool = False,
    dry_run: bool = False,
) -> int:
    """Measure a method beside its baselines; exit code 1 when a declared bar was missed.

    Args:
        method: A method or a built-in bench; without one, they are listed.
        size: smoke (under a minute), small (at most about an hour) or full (the paper's setting).
        model: A model in place of the bench's own; repeatable.
        out: Run folder, by default runs/METHOD-TIME; a run that was stopped there goes on.
        seed: Seed of everything that is drawn.
        option: NAME=VALUE, an option of the bench; repeatable, and listed by --dry-run.
        json: Print one JSON document and nothing else.
        dry_run: Print the resolved settings, and run nothing.
    """
    from lmsmith.evaluation import bench as runner

    if method is None:
        _list(json)
        return 0
    options = dict(map(_pair, option or ()))
    if dry_run:
        show_json(runner.plan(method, size, model or (), seed=seed, options=options))
        return 0
    report = runner.run_bench(method, size, model or (), out, seed=seed, options=options)
    if json:
        show_json(report.to_dict())
    else:
        show(*report.tables(), f"[quiet]{report.seconds:,.0f} s; kept in {report.folder}[/]")
    return 0 if report.passed else 1


def _pair(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not (name and equals):
        raise UsageError(f"--option {word!r} must be NAME=VALUE")
    return name, value


def _list(json: bool) -> None:
    from lmsmith import cards
    from lmsmith.display.tables import Table
    from lmsmith.evaluation.bench import BUILT_IN, benches

    known = cards.find()
    built_in = {name: purpose for name, (_, purpose) in BUILT_IN.items()}
    purposes = {name: built_in.get(name) or known[name].purpose for name in benches()}
    if json:
        show_json([{"name": name, "purpose": purpose} for name, purpose in purposes.items()])
    else:
        show(Table(["bench", "what it measures"], [[*row] for row in purposes.items()]))
