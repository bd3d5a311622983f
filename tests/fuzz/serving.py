"""The service under fire: its process, its log, its books."""

import contextlib
import json
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from support.scrape import Samples

from specserve.load.processes import PROC, family, rss_mb
from specserve.load.server import READY_WORDS, Placement, free_port, serve_command, stop

SETTINGS = """\
dtype: float32
num_threads: 1
num_pages: 256
proposers: [prediction, prompt_lookup, suffix, draft]
limits: {max_waiting: 96}
"""
"""As many pages as one request may need: requests have to give way to each other."""
START_S = 300.0
QUIET_S = 30.0


@dataclass(frozen=True, slots=True)
class Target:
    """A running service."""

    process: "subprocess.Popen[bytes]"
    port: int
    admin_port: int
    log: Path

    def get(self, path: str, admin: bool = False) -> httpx.Response:
        """Return the answer to a GET."""
        port = self.admin_port if admin else self.port
        return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=30).raise_for_status()

    def samples(self) -> Samples:
        """Return what `/metrics` says."""
        return Samples(self.get("/metrics").text)

    def cells(self) -> dict[str, Any]:
        """Return what the admin API says of each cell."""
        cells: dict[str, Any] = json.loads(self.get("/admin/v1/state", admin=True).text)["cells"]
        return cells

    def members(self) -> dict[int, str]:
        """Return the processes that serve: pid and class. A worker that Ray keeps ready does not."""
        found = {}
        for pid in family([self.process.pid]):
            with contextlib.suppress(OSError):
                name = (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if name.startswith("ray::") and not name.startswith("ray::IDLE"):
                    found[pid] = name.split(" ")[0].split(".")[0]
        return {self.process.pid: "serve"} | found

    def tracebacks(self) -> list[str]:
        """Return the last line of every traceback in the log."""
        text = self.log.read_text(errors="replace")
        return re.findall(r"^Traceback .*?\n(?=\S)(?!Traceback)(\S.*)$", text, re.M | re.S)


@contextlib.contextmanager
def target(placement: Placement, folder: Path) -> Iterator[Target]:
    """Start a service of the embedded models on free ports of the loopback interface, and stop it at the end."""
    (folder / "settings.yaml").write_text(SETTINGS)
    port, log = free_port(), folder / "server.log"
    command = [*serve_command(None, placement, port), "--config", str(folder / "settings.yaml")]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True)
    try:
        give_up_s = time.monotonic() + START_S
        while READY_WORDS not in log.read_text(errors="replace"):
            if process.poll() is not None or time.monotonic() > give_up_s:
                raise RuntimeError(f"the service did not start: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.2)
        found = re.search(r"admin at http://[^:]+:(\d+)", log.read_text())
        assert found is not None
        yield Target(process, port, int(found[1]), log)
    finally:
        stop(process)


def leaks(service: Target) -> list[str]:
    """Return what is still held though nobody asks for anything; waits until nothing is, at most `QUIET_S`."""
    give_up_s = time.monotonic() + QUIET_S
    while True:
        found = []
        for cell in service.cells().values():
            held = {name: num for name, num in cell["held_by_proposers"].items() if num}
            if cell["free_pages"] != cell["num_pages"] or cell["running"] or cell["waiting"]:
                found.append(f"{cell['num_pages'] - cell['free_pages']} pages are held: {cell}")
            if held:
                found.append(f"proposers hold {held}")
            if cell["requests"] != cell["finished"] + cell["cancelled"]:
                found.append(f"requests are not accounted for: {cell}")
            if cell["rounds_lost"]:
                found.append(f"{cell['rounds_lost']} rounds were lost")
        if not found or time.monotonic() > give_up_s:
            return found
        time.sleep(0.5)


def resident_mb(service: Target) -> float:
    """Return the memory that the service holds."""
    return rss_mb(service.process.pid) or 0.0
