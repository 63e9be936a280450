"""`lmsmith runs` and `lmsmith report`: what was measured before."""

from __future__ import annotations

from pathlib import Path

from lmsmith.display.console import say, show, show_json


def runs(*folders: Path, json: bool = False) -> None:
    """List past runs, or compare some of them side by side.

    Args:
        folders: Run folders to compare, or one folder of runs to list; `runs` without.
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

        raise UsageError(f"no folder {base}")
    described = list_runs(base)
    if json:
        show_json(described)
    elif described:
        show(runs_table(described))
    else:
        say(f"no runs in {base}; make one with: lmsmith bench METHOD")


def report(*folders: Path, out: Path = Path("docs/RESULTS.md"), json: bool = False) -> None:
    """Gather bench reports on one page, with their figures beside it.

    Args:
        folders: Folders with bench reports; `results` without.
        out: The page to write.
        json: Print one JSON document and nothing else.
    """
    from lmsmith.evaluation.report import collect

    page = collect(folders or (Path("results"),), out)
    if json:
        show_json({"page": str(page)})
    else:
        show(str(page))
