"""The processes that a server consists of: the memory they hold, and the processor time that others take from them.

Linux only, from /proc; elsewhere the answers are None.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class _Process:
    parent: int
    session: int
    cpu_s: float


def _processes() -> dict[int, _Process]:
    found: dict[int, _Process] = {}
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    for entry in PROC.glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        found[int(entry.parent.name)] = _Process(
            int(fields[1]), int(fields[3]), (int(fields[11]) + int(fields[12])) * tick_s
        )
    return found


def family(roots: Iterable[int]) -> set[int]:
    """Return the roots, the members of their sessions, and the living descendants of all these."""
    return _family(roots, _processes())


def _family(roots: Iterable[int], processes: dict[int, _Process]) -> set[int]:
    wanted = set(roots)
    found = {pid for pid, one in processes.items() if pid in wanted or one.session in wanted}
    while children := {pid for pid, one in processes.items() if one.parent in found and pid not in found}:
        found |= children
    return found


def rss_mb(root: int) -> float | None:
    """Return the resident memory of a server's whole family in MiB, shared pages counted in each; None if unknown."""
    pages = 0
    for member in family([root]):
        try:
            pages += int((PROC / str(member) / "statm").read_text().split()[1])
        except (OSError, IndexError):
            continue
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20 if pages else None


def others_cpu_s(roots: Iterable[int]) -> float | None:
    """Return the processor time, since some fixed moment, that this machine spent on anything but these families.

    Time stolen by other virtual machines counts. Only differences mean something. None if unknown.
    """
    try:
        fields = (PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
    busy_s = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    processes = _processes()
    return busy_s - sum(processes[member].cpu_s for member in _family(roots, processes))
