"""`lmsmith bench`: run a method's experiment and show its tables and checks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from lmsmith.cli.output import DryRun, Json, emit, show
from lmsmith.errors import UsageError


def bench(
    method: Annotated[str | None, Parameter(help="A method; without, what can be benched.")] = None,
    /,
    *,
    size: Annotated[
        str,
        Parameter(
            help="smoke (under a minute), small (about an hour), full (the paper's own setting)."
        ),
    ] = "smoke",
    model: Annotated[
        list[str] | None, Parameter(negative=(), help="Model instead of the bench's; repeatable.")
    ] = None,
    out: Annotated[
        Path | None, Parameter(help="Run folder; a stopped run in it goes on. [runs/METHOD-TIME]")
    ] = None,
    seed: Annotated[int, Parameter(help="Seed of everything drawn.")] = 0,
    option: Annotated[
        list[str] | None,
        Parameter(negative=(), help="NAME=VALUE, an option of the bench; repeatable."),
    ] = None,
    json: Json = False,
    dry_run: DryRun = False,
) -> int:
    """Measure a method beside its baselines; exit code 1 when a declared bar was missed."""
    from lmsmith.evaluation import bench as runner

    if method is None:
        _list(json)
        return 0
    options = dict(map(_pair, option or ()))
    if dry_run:
        emit(runner.plan(method, size, model or (), seed=seed, options=options))
        return 0
    report = runner.run_bench(method, size, model or (), out, seed=seed, options=options)
    if json:
        emit(report.to_dict())
    else:
        show(*report.tables(), f"[quiet]{report.folder}: {report.seconds:,.0f} s[/]")
    return 0 if report.passed else 1


def _pair(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not (name and equals):
        raise UsageError(f"--option {word!r} must be NAME=VALUE")
    return name, value


def _list(json: bool) -> None:
    from lmsmith import cards
    from lmsmith.display.tables import Table
    from lmsmith.evaluation.bench import benches

    known = cards.find()
    purposes = {n: known[n].purpose if n in known else "built into lmsmith" for n in benches()}
    if json:
        emit([{"name": name, "purpose": purpose} for name, purpose in purposes.items()])
    else:
        show(Table(["bench", "what it measures"], [[*row] for row in purposes.items()]))
