"""What a number was measured on: machine, versions, revision, threads.

Not for: whether the machine is ready (`lmsmith doctor` asks that).
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from lmsmith.models.doctor import usable_cores

PACKAGES = ("lmsmith", "torch", "transformers", "tokenizers", "numpy")


def environment() -> dict[str, Any]:
    """The machine and the software as JSON: CPU, cores, threads, versions, revision.

    What would import torch is only told when torch is loaded already.
    """
    found: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "platform": platform.platform(terse=True),
        "python": platform.python_version(),
        "versions": versions(),
        "revision": revision(),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        found["threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            found["accelerator"] = torch.cuda.get_device_name()
    return found


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Installed versions of the packages that numbers depend on."""
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


@cache
def revision() -> str | None:
    """Git revision of the checkout lmsmith runs from, `-dirty` if changed; `None` if installed."""
    here = Path(__file__)

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(here.parent), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
        return done.stdout.strip()

    try:
        # An installed copy may lie inside somebody else's repository; then nothing is tracked.
        git("ls-files", "--error-unmatch", here.name)
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/src")
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


@cache
def cpu_name() -> str:
    """The processor's model name as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def fastest_threads(repeats: int = 5) -> int:
    """The torch thread count that runs small steps fastest on this machine as busy as it is.

    Tries one thread and every available core on a stack of narrow matrix products, the shape of
    decoding with a small model, interleaved; the median decides. A thread count that the user
    set through `OMP_NUM_THREADS` stands. Torch's own setting is left as it was found.
    """
    import torch

    before = torch.get_num_threads()
    if os.environ.get("OMP_NUM_THREADS") or usable_cores() == 1:
        return before
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4, 576, generator=generator)
    wide = torch.randn(576, 1536, generator=generator)
    narrow = torch.randn(1536, 576, generator=generator) / 1000
    times: dict[int, list[float]] = {1: [], usable_cores(): []}
    try:
        for _ in range(repeats):
            for threads, measured in times.items():
                torch.set_num_threads(threads)
                started = time.perf_counter()
                out = rows
                for _ in range(60):
                    out = torch.relu(out @ wide) @ narrow
                measured.append(time.perf_counter() - started)
    finally:
        torch.set_num_threads(before)
    return min(times, key=lambda threads: sorted(times[threads])[repeats // 2])
