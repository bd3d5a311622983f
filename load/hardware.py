"""What a measurement was made on, and of."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def hardware() -> dict[str, Any]:
    """Return the processor's name, the cores this process may use and the machine's memory (None: unknown)."""
    return {
        "cpu": _field(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": _memory_gb(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _field(path: Path, name: str) -> str | None:
    try:
        found = path.read_text()
    except OSError:
        return None
    for line in found.splitlines():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return None


def _memory_gb() -> float | None:
    found = _field(Path("/proc/meminfo"), "MemTotal")
    return None if found is None else round(int(found.split()[0]) / 2**20, 1)


def available_mb() -> float | None:
    """Return the memory in MiB that new processes may take without pushing others out; None if unknown."""
    found = _field(Path("/proc/meminfo"), "MemAvailable")
    return None if found is None else int(found.split()[0]) / 2**10


def commit() -> str | None:
    """Return the checkout's commit, with `-dirty` after it when files have changed; None outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()
