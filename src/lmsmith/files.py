"""Files and folders that a crash leaves whole, one process at a time, and refusals in one line."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lmsmith.errors import RunFolderBusyError, StorageError

# What an interrupted writer leaves behind is named so; whoever finds it may delete it.
TEMPORARY = ".writing-"
LOCK = ".lock"


def write_atomic(path: Path, blob: bytes) -> None:
    """Write a file so that a crash leaves the old one or the new one, never a part."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    try:
        with temporary.open("wb") as file:
            file.write(blob)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextmanager
def folder_atomic(path: Path) -> Iterator[Path]:
    """Fill a folder that appears under its name only once it is whole and on disk.

    Yields a temporary folder to write into. A folder already there is replaced.
    """
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                _sync_file(file)
            else:
                sync_folder(file)
        sync_folder(temporary)
        # A folder cannot be renamed over one that is not empty.
        shutil.rmtree(path, ignore_errors=True)
        os.replace(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(path.parent)


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Bring a folder's entries to disk, where the system can."""
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lock_folder(path: Path) -> Any:
    """Hold the folder's lock until the returned file is closed or the process dies."""
    file = (path / LOCK).open("ab")
    try:
        import fcntl
    except ImportError:  # no such call on Windows: opened for sharing, not guarded
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise RunFolderBusyError(
            f"another process is working in {path}; wait for it or give another folder with --out"
        ) from error
    return file


_REASONS = {
    errno.ENOSPC: "no space left on the disk",
    errno.EDQUOT: "the disk quota is used up",
    errno.EACCES: "no permission",
    errno.EPERM: "no permission",
    errno.EROFS: "the disk is read-only",
    errno.ENOTDIR: "a part of the path is a file",
    errno.EEXIST: "a file of that name is there",
}


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn the system's refusals into one line that says what to do."""
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
        raise StorageError(
            f"cannot write the run folder {path}: {reason}; what was done before is kept; "
            "make room or give another folder with --out, then run the same command again"
        ) from error
