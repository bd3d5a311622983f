"""A `specserve serve` of the bench's own: started before the first request, stopped whatever happens."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from .errors import LoadError, RivalError

Placement = Literal["inline", "actors"]
READY_WORDS = "specserve: ready at"
START_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 60.0
LOG_LINES = 30


@dataclass(frozen=True, slots=True)
class Server:
    """A running server of ours."""

    url: str
    pid: int


def free_port() -> int:
    """Return a port of the loopback interface that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve_command(model: str | None, placement: Placement, port: int, flags: Sequence[str] = ()) -> list[str]:
    """Return the command that serves `model` (None: the embedded one) on `port`, with further `flags`."""
    named = [] if model is None else [model]
    ports = ["--port", str(port), "--admin-port", "0"]
    return [sys.executable, "-m", "specserve.cli", "serve", *named, "--placement", placement, *ports, *flags]


@contextlib.contextmanager
def serving(command: list[str], port: int, one_of_many: bool = False) -> Iterator[Server]:
    """Run `command` in a session of its own, yield it once it says that it is ready, and stop it at the end.

    Raises: LoadError when it ends before it is ready; when it fails then or later, what it last said goes to stderr.
    `one_of_many` says it only of a server that ended: of the others, nobody knows which one failed.
    """
    with tempfile.TemporaryDirectory(prefix="specserve-bench-") as folder:
        log = Path(folder) / "server.log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True
            )
        try:
            _wait_ready(process, log)
            yield Server(f"http://127.0.0.1:{port}", process.pid)
        except LoadError as error:
            if not isinstance(error, RivalError) and not (one_of_many and process.poll() is None):
                _forward(log)
            raise
        finally:
            stop(process)


def _wait_ready(process: "subprocess.Popen[bytes]", log: Path) -> None:
    give_up = time.monotonic() + START_TIMEOUT_S
    while READY_WORDS not in log.read_text(errors="replace"):
        code = process.poll()
        if code is not None:
            raise LoadError(f"The server ended with exit code {code} before it was ready.")
        if time.monotonic() > give_up:
            raise LoadError(f"The server was not ready after {START_TIMEOUT_S:.0f} s.")
        time.sleep(0.1)


def _forward(log: Path) -> None:
    said = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    if said:
        print("The server's last words:", *(f"  {line}" for line in said), sep="\n", file=sys.stderr)


def stop(process: "subprocess.Popen[bytes]") -> None:
    """Ask the server to stop, as Ctrl-C does, and end what is left of its process group."""
    try:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the bench as Ctrl-C does, so that what it started is stopped.

    Ctrl-C itself is caught too: a shell's background job ignores it, and so would whatever it starts.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
