"""`lmsmith runs` and `lmsmith report`: what was measured before."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from lmsmith.cli.output import Json, emit, say, show


def runs(
    *folders: Annotated[
        Path, Parameter(help="Run folders to compare, or one folder of runs to list. [runs]")
    ],
    json: Json = False,
) -> None:
    """List past runs, or compare some of them side by side."""
    from lmsmith.evaluation.report import Report, compare, list_runs, runs_table

    if len(folders) > 1:
        if json:
            emit([Report.load(folder).to_dict() for folder in folders])
        else:
            show(*compare(folders))
        return
    base = folders[0] if folders else Path("runs")
    if folders and not base.is_dir():
        from lmsmith.errors import UsageError

        raise UsageError(f"no folder {base}")
    described = list_runs(base)
    if json:
        emit(described)
    elif described:
        show(runs_table(described))
    else:
        say(f"no runs in {base}; make one with: lmsmith bench METHOD")


def report(
    *folders: Annotated[Path, Parameter(help="Folders with bench reports. [results]")],
    out: Annotated[Path, Parameter(help="The page to write.")] = Path("docs/RESULTS.md"),
    json: Json = False,
) -> None:
    """Gather bench reports on one page, with their figures beside it."""
    from lmsmith.evaluation.report import collect

    page = collect(folders or (Path("results"),), out)
    if json:
        emit({"page": str(page)})
    else:
        show(str(page))
