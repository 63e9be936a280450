"""The cache folder: where it is, what fits in it, and who may write to it.

Not for: what is kept there (`known`, `wheels`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lmsmith.errors import StorageError

HINT = "free some space, or set LMSMITH_CACHE to a folder on another disk"
# What the system says when a file cannot grow: disk full, quota used up, file size limit.
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}


def cache_dir() -> Path:
    """The cache folder: `$LMSMITH_CACHE`, or `~/.cache/lmsmith`. It need not exist."""
    return Path(os.environ.get("LMSMITH_CACHE") or "~/.cache/lmsmith").expanduser()


def need_space(size: int, what: str) -> None:
    """Check that the cache can take `size` more bytes.

    Raises:
        StorageError: It cannot.
    """
    place = cache_dir()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < size:
        raise StorageError(
            f"{what} needs {size / 1e9:.1f} GB in {cache_dir()}, but {free / 1e9:.1f} GB are free; "
            f"{HINT}"
        )


@contextmanager
def storing(what: str, size: int) -> Iterator[None]:
    """Turn a full or read-only disk, met inside the block, into one clear line.

    Args:
        what: What is being stored, as the message names it.
        size: About how many bytes it needs in all.

    Raises:
        StorageError: There was no space, or no permission.
    """
    try:
        yield
    except Exception as error:
        code = getattr(error, "errno", None)
        if code is None:
            # The safetensors writer is not Python and puts the system's error into its text.
            found = re.search(r"\(os error (\d+)\)", str(error))
            code = int(found[1]) if found else None
        if code in FULL:
            raise StorageError(
                f"no space left for {what}, which needs about {size / 1e9:.1f} GB in "
                f"{cache_dir()}; {HINT}"
            ) from None
        if code in FORBIDDEN:
            raise StorageError(
                f"{cache_dir()} cannot be written; set LMSMITH_CACHE to a folder that can be"
            ) from None
        raise


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the cache's lock of this name; other processes wait. A killed holder frees it."""
    folder = cache_dir() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def sync(path: Path) -> None:
    """Force a file, or a folder's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
