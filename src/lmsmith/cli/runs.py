"""`lmsmith runs` and `lmsmith report`: what was measured before."""

from __future__ import annotations

from pathlib import Path

from lmsmith.display.console import say, show, show_json


def runs(*folders: Path, json: bool = False) -> None:
    """List past runs, or compare some of them side by side.

    Args:
        folders: Run folders to compare, or one folder of runs to list; by default `runs`.
        json: Print one JSON document and nothing else.
    """
    from lmsmith.evaluation.report import Report, compare, list_runs, runs_table

    if len(folders) > 1:
        if json:
            show_json([Report.load(folder).to_dict() for folder in folders])
        else:
            show(*compare(folders))
        return
    base = folders[0] if folders else Path("runs")
    if folders and not base.is_dir():
        from lmsmith.errors import UsageError

        raise UsageError(f"no folder {base}; give run folders, or one that holds them")
    described = list_runs(base)
    if json:
        show_json(described)
    elif described:
        show(runs_table(described))
    else:
        say(f"no runs in the folder {base}; make one with: lmsmith bench METHOD")


def report(*folders: Path, out: Path = Path("docs/RESULTS.md"), json: bool = False) -> None:
    """Gather bench reports on one page, with their figures beside it.

    Args:
        folders: Folders with bench reports; by default `results`.
        out: The page to write.
        json: Print one JSON document and nothing else.
    """
    from lmsmith.evaluation.report import collect

    page = collect(folders or (Path("results"),), out)
    if json:
        show_json({"page": str(page)})
    else:
        show(str(page))
