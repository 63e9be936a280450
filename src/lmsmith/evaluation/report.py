"""What a bench found, as JSON, as tables, as Markdown; and many of them on one page.

Not for: measuring (`bench`) or keeping raw results (`runs`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lmsmith.display.tables import MISS, PASS, Cell, Measured, Styled, Table, number
from lmsmith.errors import UsageError
from lmsmith.evaluation import runs
from lmsmith.evaluation.runs import REPORT, as_json, run_folders, write_atomic


@dataclass
class Report:
    """The content of `report.json`.

    Attributes:
        method: Name of the bench.
        size: `smoke`, `small` or `full`.
        model: Names of the models it ran on, joined by `+`.
        arms: One entry a section, metric and arm: mean with interval, ratio and difference to the
            baseline with paired intervals, cost.
        checks: One entry a declared check: name, value, relation, bar, passed, source, note.
        environment: Machine, versions, revision, date.
        seconds: Time at work, over all sessions of the run.
        settings: What the run was asked for.
        figures: Name, title and file of every figure, relative to the run folder.
    """

    method: str
    size: str
    model: str
    arms: list[dict[str, Any]]
    checks: list[dict[str, Any]]
    environment: dict[str, Any]
    seconds: float
    settings: dict[str, Any] = field(default_factory=dict)
    figures: list[dict[str, Any]] = field(default_factory=list)
    folder: Path | None = None

    @property
    def passed(self) -> bool:
        """Whether every declared check met its bar."""
        return all(check["passed"] for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """The report as `report.json` holds it."""
        document = asdict(self)
        del document["folder"]
        return as_json(document)

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Read a report from a run folder or a `report.json`.

        Raises:
            UsageError: There is none, or it is not a report.
        """
        path = Path(path)
        path = path / REPORT if path.is_dir() else path
        try:
            document = json.loads(path.read_bytes())
            return cls(**document, folder=path.parent)
        except FileNotFoundError:
            raise UsageError(f"{path.parent} has no finished report") from None
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(f"{path} is not a bench report: {error}") from error

    def tables(self) -> list[Table]:
        """One table a section and metric, then one of the checks."""
        groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for row in self.arms:
            groups.setdefault((row["section"], row["metric"]), []).append(row)
        tables = [_arms_table(rows) for rows in groups.values()]
        return [*tables, _checks_table(self.checks)] if self.checks else tables

    def to_markdown(self, level: int = 1, figures: str = "") -> str:
        """The report as a Markdown page or a part of one.

        Args:
            level: Level of its heading.
            figures: What to put before a figure's file name in links.
        """
        parts = [f"{'#' * level} {self.method}: {self.size}{f', {self.model}' * bool(self.model)}"]
        parts += [table.markdown().rstrip("\n") for table in self.tables()]
        parts += [f"![{f['title']}]({figures}{f['file']})" for f in self.figures]
        parts.append(self.provenance())
        return "\n\n".join(parts) + "\n"

    def provenance(self) -> str:
        """One paragraph: when, on what, at which revision, how long."""
        env = self.environment
        versions = ", ".join(f"{name} {v}" for name, v in env.get("versions", {}).items())
        models = "; ".join(
            f"{name} in {facts.get('dtype')} on {facts.get('device')}"
            for name, facts in env.get("models", {}).items()
        )
        facts = [
            f"Measured {env.get('finished', 'at an unknown time')}",
            f"revision {' then '.join(env.get('revisions') or ['unknown'])}",
            f"seed {self.settings.get('seed', 0)}",
            f"{env.get('cpu', 'unknown processor')}, {env.get('cores', '?')} cores",
            f"torch threads: {env['threads']}" if "threads" in env else "",
            models,
            versions,
            f"{self.seconds:,.0f} s",
        ]
        return "; ".join(fact for fact in facts if fact) + "."


def collect(
    folders: Iterable[str | Path] = ("results",), out: str | Path = "docs/RESULTS.md"
) -> Path:
    """Gather every report under `folders` on one page, with their figures beside it.

    Of several reports with the same method, size and model the newest is shown.

    Raises:
        UsageError: A folder does not exist, or there is no report under any of them.
    """
    roots = [Path(folder) for folder in folders]
    for folder in roots:
        if not folder.exists():
            raise UsageError(f"no folder {folder}; give one that holds bench reports")
    newest: dict[tuple[str, str, str], Report] = {}
    for path in sorted(path for folder in roots for path in folder.rglob(REPORT)):
        report = Report.load(path)
        key = (report.method, report.size, report.model)
        if key not in newest or _finished(newest[key]) <= _finished(report):
            newest[key] = report
    if not newest:
        where = ", ".join(map(str, roots))
        raise UsageError(f"no report under {where}; make one with: lmsmith bench METHOD")
    reports = [newest[key] for key in sorted(newest)]
    out = Path(out)
    parts = [
        "# Results",
        "Every number here comes from `lmsmith bench`; missed bars stay. "
        "Made by `lmsmith report`; do not edit by hand.",
        _summary(reports).markdown().rstrip("\n"),
    ]
    for report in reports:
        prefix = _copy_figures(report, out.parent)
        parts.append(report.to_markdown(level=2, figures=prefix).rstrip("\n"))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, ("\n\n".join(parts) + "\n").encode())
    return out


def list_runs(base: str | Path = "runs") -> list[dict[str, Any]]:
    """Past runs under `base`, oldest first: folder, method, size, models, state, checks."""
    return [_describe(path) for path in run_folders(base)]


def runs_table(described: Sequence[Mapping[str, Any]]) -> Table:
    """`list_runs` as a table."""
    styles = {"finished": "pass", "running": "name", "unfinished": "quiet"}
    rows: list[list[Cell]] = [
        [
            run["folder"],
            f"{run['method']} {run['size']}",
            run["model"],
            run["started"],
            Styled(run["state"], styles[run["state"]]),
            run["rows"],
            "" if run["checks"] is None else f"{run['passed']} of {run['checks']}",
        ]
        for run in described
    ]
    return Table(
        ["folder", "bench", "model", "started", "state", "rows", "checks passed"],
        rows,
        styles={"folder": "name"},
    )


def compare(folders: Sequence[str | Path]) -> list[Table]:
    """Finished runs side by side: one table a section and metric, one column a run.

    Raises:
        UsageError: A folder holds no finished report.
    """
    reports = [Report.load(folder) for folder in folders]
    names = [report.folder.name if report.folder else report.method for report in reports]
    found: dict[tuple[str, str, str], dict[str, dict[int, Measured]]] = {}
    for column, report in enumerate(reports):
        for row in report.arms:
            group = found.setdefault((row["section"], row["metric"], row["unit"]), {})
            group.setdefault(row["arm"], {})[column] = _measured(row)
    columns = range(len(reports))
    tables = [
        Table(
            ["arm", *names],
            [[arm, *(values.get(column) for column in columns)] for arm, values in group.items()],
            title=_title(*key),
            styles={"arm": "name"},
        )
        for key, group in found.items()
    ]
    marks: dict[str, dict[int, Cell]] = {}
    for column, report in enumerate(reports):
        for check in report.checks:
            mark = PASS if check["passed"] else MISS
            marks.setdefault(check["name"], {})[column] = Styled(
                f"{_shown(check['value'])} {mark.text}", mark.style
            )
    if marks:
        rows = [[name, *(found.get(c) for c in columns)] for name, found in marks.items()]
        tables.append(Table(["check", *names], rows, title="Checks"))
    return tables


def _arms_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    first = rows[0]
    costs = list(dict.fromkeys(name for row in rows for name in row.get("cost") or {}))
    baseline = first.get("baseline")
    columns = ["arm", "mean [95 %]"]
    if baseline:
        columns.append(f"ratio to {baseline} [95 %]")
    lines: list[list[Cell]] = []
    for row in rows:
        line: list[Cell] = [row["arm"], _measured(row)]
        if baseline:
            ratio = row.get("ratio")
            line.append(_measured(ratio, _judge(ratio, row["better"])) if ratio else None)
        line += [(row.get("cost") or {}).get(name) for name in costs]
        lines.append([*line, row["items"]])
    better = f"{first['better']} is better" if first["better"] else ""
    return Table(
        [*columns, *costs, "items"],
        lines,
        title=_title(first["section"], first["metric"], first["unit"]),
        note=better,
        styles={"arm": "name"},
    )


def _checks_table(checks: Sequence[Mapping[str, Any]]) -> Table:
    rows: list[list[Cell]] = [
        [
            PASS if check["passed"] else MISS,
            check["name"],
            _shown(check["value"]),
            f"{check['relation']} {_shown(check['bar'])}",
            check["source"],
            check["note"],
        ]
        for check in checks
    ]
    columns = ["", "check", "value", "bar", "bar from", "note"]
    if not any(check["note"] for check in checks):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    passed = sum(bool(check["passed"]) for check in checks)
    return Table(columns, rows, title=f"Checks: {passed} of {len(checks)} passed")


def _summary(reports: Sequence[Report]) -> Table:
    return Table(
        ["bench", "size", "model", "checks passed", "measured"],
        [
            [
                report.method,
                report.size,
                report.model,
                f"{sum(bool(c['passed']) for c in report.checks)} of {len(report.checks)}",
                _finished(report)[:10],
            ]
            for report in reports
        ],
    )


def _measured(row: Mapping[str, Any], style: str = "") -> Measured:
    return Measured(row["value"], row["low"], row["high"], style)


def _judge(ratio: Mapping[str, Any], better: str) -> str:
    """Style of a ratio: good or bad only when its whole interval lies on one side of 1."""
    low, high = ratio["low"], ratio["high"]
    if low is None or high is None or not better or low <= 1 <= high:
        return ""
    return "pass" if (high < 1) == (better == "lower") else "miss"


def _title(section: str, metric: str, unit: str) -> str:
    what = f"{metric}, {unit}" if unit and unit != metric else metric
    return f"{section}: {what}" if section else what


def _shown(value: Any) -> str:
    return number(value) if isinstance(value, float) else "–" if value is None else str(value)


def _finished(report: Report) -> str:
    return str(report.environment.get("finished", ""))


def _copy_figures(report: Report, page_folder: Path) -> str:
    """Copy a report's figures to `figures/` beside the page; returns the link prefix."""
    name = "-".join(filter(None, (report.method, report.size, report.model.replace("/", "-"))))
    target = page_folder / "figures" / name
    for figure in report.figures:
        source = (report.folder or Path()) / figure["file"]
        if source.is_file():
            destination = target / figure["file"]
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, destination)
    return f"figures/{name}/"


def _describe(path: Path) -> dict[str, Any]:
    config = runs._read_json(path / runs.CONFIG)
    finished = (path / REPORT).exists()
    report = Report.load(path) if finished else None
    items = path / runs.ITEMS
    sessions = config.get("sessions") or [{}]
    state = "finished" if finished else "running" if runs.is_busy(path) else "unfinished"
    return {
        "folder": str(path),
        "method": config.get("method", ""),
        "size": config.get("size", ""),
        "model": "+".join(config.get("models", [])),
        "seed": config.get("seed"),
        "started": sessions[0].get("started", "")[:16].replace("T", " "),
        "state": state,
        "rows": items.read_bytes().count(b"\n") if items.exists() else 0,
        "checks": len(report.checks) if report else None,
        "passed": sum(bool(c["passed"]) for c in report.checks) if report else None,
        "seconds": report.seconds if report else None,
    }
