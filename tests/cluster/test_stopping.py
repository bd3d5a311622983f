"""`specserve serve` with actors ends in order when it is told to, as a service manager tells it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from specserve.load.server import free_port

pytestmark = pytest.mark.cluster

READY_TIMEOUT_S = 120
STOP_TIMEOUT_S = 60


def test_sigterm_stops_everything_and_is_no_failure(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "specserve.cli", "serve", "--placement", "actors", "--port", str(port)]
    own_ray = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    said = tmp_path / "said"
    with said.open("w") as errors, subprocess.Popen(
        [*command, "--admin-port", str(free_port()), "--policy-store", str(tmp_path / "policies.db")],
        stdout=subprocess.PIPE, stderr=errors, text=True, env=own_ray,
    ) as serving:  # fmt: skip
        try:
            assert serving.stdout is not None
            assert "ready at" in serving.stdout.readline(), said.read_text()
            assert httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200
            started = psutil.Process(serving.pid).children(recursive=True)
            assert any("raylet" in one.name() for one in started)
            serving.send_signal(signal.SIGTERM)
            assert serving.wait(STOP_TIMEOUT_S) == 0
        finally:
            serving.kill()
    assert "specserve: stopping ..." in said.read_text()
    assert not psutil.wait_procs(started, timeout=STOP_TIMEOUT_S)[1]
