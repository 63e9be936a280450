"""What this machine has for running models, as plain data.

Not for: judging or printing it (`lmsmith doctor`), or what a measurement ran on (`evaluation`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from lmsmith.models import known
from lmsmith.models.cache import cache_dir

REGISTRY_PATIENCE = 10.0


def hardware() -> dict[str, Any]:
    """Cores, torch's threads, accelerators, and the dtype `auto` stands for. Imports torch."""
    import torch

    from lmsmith.models.opening import native_bfloat16, resolve_device, resolve_dtype

    device = resolve_device("auto")
    accelerators = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "native_bfloat16": native_bfloat16(),
        "accelerators": [torch.cuda.get_device_name(index) for index in range(accelerators)],
        "device": str(device),
        "dtype": str(resolve_dtype("auto", device)).removeprefix("torch."),
    }


def usable_cores() -> int:
    """Cores this process may use, which may be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory() -> dict[str, int | None]:
    """Bytes of memory, in all and still available; `None` where the system does not tell."""
    sizes: dict[str, int] = {}
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            sizes[name] = 1024 * int(value.split()[0])
    except (OSError, ValueError):
        pass
    return {"total": sizes.get("MemTotal"), "available": sizes.get("MemAvailable")}


def cache() -> dict[str, Any]:
    """Where known models are kept, whether it can be written, and the bytes that are free there."""
    place = folder = cache_dir()
    while not place.exists():
        place = place.parent
    return {
        "folder": str(folder),
        "writable": place.is_dir() and os.access(place, os.W_OK),
        "free": shutil.disk_usage(place).free,
    }


def registry_answers() -> bool:
    """Whether pip, as it is set up here, finds the default model's package."""
    package, _ = known.KNOWN["smollm2-135m"].packages[0]
    command = [sys.executable, "-m", "pip", "index", "versions", package]
    command += ["--retries", "0", "--timeout", "5", "--disable-pip-version-check", "--no-input"]
    try:
        asked = subprocess.run(command, capture_output=True, timeout=REGISTRY_PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == 0
