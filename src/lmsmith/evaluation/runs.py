"""Run folders: what was asked, every result as it came, the report; safe to kill at any point.

Not for: what is measured (`bench`) or what it means (`report`).

A folder holds `config.json` (settings, seed, and one entry a session with versions and
revision), `items.jsonl` (one line an item and arm), `measurements.json` (what is measured once),
`report.json` and `figures/`. Whole files are replaced atomically; `items.jsonl` only grows, one
flush to disk a batch, and a line torn by a crash is dropped on the next opening. A lock that the
system frees when a process dies keeps two processes out of one folder.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from lmsmith.errors import RunFolderBusyError, StorageError, UsageError
from lmsmith.evaluation.environment import revision, versions
from lmsmith.files import LOCK, TEMPORARY, lock_folder, storage_errors, write_atomic

CONFIG, ITEMS, MEASUREMENTS, REPORT = (
    "config.json",
    "items.jsonl",
    "measurements.json",
    "report.json",
)


class RunFolder:
    """One run on disk, held by this process until `close`.

    Make one with `RunFolder.open`.

    Attributes:
        path: The folder.
        config: The resolved settings that identify the run.
        resumed: Whether the folder held an earlier session's work.
    """

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        """Lock `path`, then begin a run in it or check that it is the same one."""
        self.path, self.config = path, as_json(config)
        with storage_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            self._lock = lock_folder(path)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(
        cls, out: str | Path | None, config: Mapping[str, Any], base: str | Path = "runs"
    ) -> RunFolder:
        """Begin a run, or go on with the one that these settings began.

        Args:
            out: The folder. `None` goes on with the newest unfinished folder of the same settings
                under `base`, or begins `<base>/<method>-<time>`.
            config: Resolved settings, with the key `method`.
            base: Where folders without a given name live.

        Raises:
            UsageError: `out` holds something else, or a run with other settings; the message
                says which.
            RunFolderBusyError: Another process is writing `out`.
            StorageError: The folder cannot be written or read.
        """
        if out is not None:
            return cls(Path(out), config)
        wanted = as_json(config)
        for path in sorted(run_folders(base), key=_started, reverse=True):
            if (path / REPORT).exists() or _settings(_read_json(path / CONFIG)) != wanted:
                continue
            try:
                return cls(path, config)
            except RunFolderBusyError:
                continue
        return cls(_new_folder(Path(base), str(config["method"])), config)

    def _open(self) -> None:
        names = {p.name for p in self.path.iterdir() if p.name != LOCK}
        leftovers = {name for name in names if name.startswith(TEMPORARY)}
        with storage_errors(self.path):
            for name in leftovers:
                (self.path / name).unlink()
        names -= leftovers
        self.resumed = CONFIG in names
        if not self.resumed and names:
            raise UsageError(
                f"{self.path} is not empty and is not a run folder; give another folder with --out"
            )
        stored = _read_json(self.path / CONFIG) if self.resumed else dict(self.config)
        if _settings(stored) != self.config:
            raise UsageError(
                f"{self.path} holds a run with other settings ({_differences(stored, self.config)}"
                "); give another folder with --out"
            )
        self.rows = self._read_items()
        self.measurements = _read_json(self.path / MEASUREMENTS, missing={})
        self._sessions = self._finished_sessions(stored.get("sessions", []))
        self._begun = time.monotonic()
        if not self.finished:
            self._sessions.append(
                {
                    "started": datetime.now().astimezone().isoformat(timespec="seconds"),
                    "revision": revision(),
                    "versions": versions(),
                }
            )
            self._write_config()

    @property
    def finished(self) -> bool:
        """Whether the report is written."""
        return (self.path / REPORT).exists()

    @property
    def seconds(self) -> float:
        """Time at work so far, over all sessions."""
        earlier = sum(session.get("seconds", 0.0) for session in self._sessions)
        return earlier + (0.0 if self.finished else time.monotonic() - self._begun)

    @property
    def revisions(self) -> list[str]:
        """Revisions of the code that worked on this run, in order, without repeats."""
        return list(dict.fromkeys(str(session["revision"]) for session in self._sessions))

    def append(self, rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Add lines to `items.jsonl`; when this returns they are on disk.

        Returns:
            The rows as a later session will read them back.

        Raises:
            StorageError: They could not be written; none of them counts.
        """
        lines = [json.dumps(row, default=_plain, ensure_ascii=False) for row in rows]
        # A text under study may hold a lone surrogate; JSON readers take it back the same way.
        blob = "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogatepass")
        with storage_errors(self.path), (self.path / ITEMS).open("ab") as file:
            before = file.tell()
            try:
                file.write(blob)
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                with suppress(OSError):
                    os.truncate(self.path / ITEMS, before)
                raise
        added = [json.loads(line) for line in lines]
        self.rows.extend(added)
        return added

    def count(self) -> int:
        """Lines of `items.jsonl` on disk."""
        path = self.path / ITEMS
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def measure(self, name: str, value: Any) -> Any:
        """Keep a value measured once; returns it as a later session will read it back."""
        self.measurements[name] = as_json(value)
        self.write_json(MEASUREMENTS, self.measurements)
        return self.measurements[name]

    def write_json(self, name: str, document: Any) -> None:
        """Replace a JSON file of the folder atomically."""
        text = json.dumps(document, indent=2, ensure_ascii=False, default=_plain) + "\n"
        self.write(name, text.encode("utf-8", "surrogatepass"))

    def write(self, name: str, blob: bytes) -> Path:
        """Replace a file of the folder atomically and return its path."""
        path = self.path / name
        with storage_errors(self.path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, blob)
        return path

    def finish(self, report: Mapping[str, Any]) -> None:
        """Write the report, which marks the run as finished."""
        self._sessions[-1]["seconds"] = round(time.monotonic() - self._begun, 3)
        self._write_config()
        self.write_json(REPORT, report)

    def close(self) -> None:
        """Let go of the folder; a finished one keeps no lock file."""
        if self.finished:
            with suppress(OSError):
                (self.path / LOCK).unlink()
        self._lock.close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _write_config(self) -> None:
        self.write_json(CONFIG, {**self.config, "sessions": self._sessions})

    def _finished_sessions(self, sessions: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Sessions that were killed get the time up to the last thing they wrote."""
        written = [self.path / name for name in (CONFIG, ITEMS, MEASUREMENTS)]
        last = max((p.stat().st_mtime for p in written if p.exists()), default=0.0)
        for session in sessions:
            if "seconds" not in session:
                started = datetime.fromisoformat(session["started"]).timestamp()
                session["seconds"] = round(max(0.0, last - started), 3)
        return sessions

    def _read_items(self) -> list[dict[str, Any]]:
        """All whole lines; a torn last one is cut off the file."""
        path = self.path / ITEMS
        if not path.exists():
            return []
        with storage_errors(self.path):
            blob = path.read_bytes()
            whole = blob.rfind(b"\n") + 1
            if whole < len(blob):
                os.truncate(path, whole)
        rows = []
        for number, line in enumerate(blob[:whole].splitlines(), start=1):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise StorageError(
                    f"{path} line {number} is damaged; delete that line or give another --out"
                ) from error
        return rows


def run_folders(base: str | Path) -> list[Path]:
    """Run folders of benches at `base` or right under it, by name."""
    base = Path(base)
    if _of_a_bench(base):
        return [base]
    if not base.is_dir():
        return []
    return sorted(p for p in base.iterdir() if _of_a_bench(p))


def _of_a_bench(path: Path) -> bool:
    """Trainings have a folder with a configuration as well, but no method."""
    try:
        return "method" in json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except OSError:
        return False
    except (ValueError, TypeError):
        return True  # a broken one is shown, and told so when it is read


def is_busy(path: str | Path) -> bool:
    """Whether some process is at work in a run folder."""
    if not (Path(path) / LOCK).exists():
        return False
    try:
        lock_folder(Path(path)).close()
    except RunFolderBusyError:
        return True
    except OSError:
        pass
    return False


def as_json(value: Any) -> Any:
    """The value as it looks after a trip through JSON: tuples are lists, numpy is plain."""
    return json.loads(json.dumps(value, default=_plain))


def _plain(value: Any) -> Any:
    """Numpy and torch values as plain numbers and lists, paths as text."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be kept in a run folder: {value!r}")


def _settings(stored: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in stored.items() if key != "sessions"}


def _differences(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """`seed: 0 there, 1 here` for every setting that differs."""
    there, here = _flat(_settings(stored)), _flat(wanted)
    keys = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    nothing = "nothing"
    return "; ".join(
        f"{key}: {there.get(key, nothing)} there, {here.get(key, nothing)} here" for key in keys
    )


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        flat.update(_flat(value, f"{name}.") if isinstance(value, dict) else {name: value})
    return flat


def _started(path: Path) -> tuple[str, str]:
    sessions = _read_json(path / CONFIG).get("sessions") or [{}]
    return sessions[0].get("started", ""), path.name


def _new_folder(base: Path, method: str) -> Path:
    """Make `<base>/<method>-<time>`, numbered if another process took the name."""
    stem = f"{method}-{datetime.now():%Y%m%d-%H%M%S}"
    with storage_errors(base):
        base.mkdir(parents=True, exist_ok=True)
        for number in range(1, 1000):
            path = base / (stem if number == 1 else f"{stem}-{number}")
            try:
                path.mkdir()
            except FileExistsError:
                continue
            return path
    raise StorageError(f"{base} already holds too many folders named {stem}")


def _read_json(path: Path, missing: Any = None) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        if missing is not None:
            return missing
        raise StorageError(f"{path} is missing; give another folder with --out") from None
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} cannot be read ({error}); give another --out") from error
