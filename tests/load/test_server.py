"""A server of the bench's own leaves with the bench, however either of them behaves; memory and strangers are seen."""

import os
import select
import signal
import sys
from pathlib import Path

import pytest

from specserve.load import server
from specserve.load.errors import LoadError
from specserve.load.processes import others_cpu_s, rss_mb
from specserve.load.server import ended_by_signals, free_port, serving

READY = "import sys, signal; print('specserve: ready at x', flush=True)"
STUBBORN = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); {READY}; signal.pause()"
linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_it_is_stopped_at_the_end_and_by_any_exception(serve_program: list[str]) -> None:
    port = free_port()
    with serving([*serve_program, str(port)], port) as found:
        assert found.url == f"http://127.0.0.1:{port}"
        assert _alive(found.pid)
    assert not _alive(found.pid)
    port = free_port()
    with pytest.raises(KeyboardInterrupt), serving([*serve_program, str(port)], port) as found:
        raise KeyboardInterrupt
    assert not _alive(found.pid)


def test_one_that_does_not_stop_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STOP_TIMEOUT_S", 0.1)
    with serving([sys.executable, "-c", STUBBORN], 1) as found:
        pass
    assert not _alive(found.pid)


def test_what_it_started_and_left_behind_ends_too(tmp_path: Path) -> None:
    held = tmp_path / "held"
    os.mkfifo(held)
    reader = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    with serving(["sh", "-c", f"exec 9>{held}; sleep 1000 & echo specserve: ready at x; wait"], 1):
        pass
    ended, _, _ = select.select([reader], [], [], 10.0)
    assert ended, "something still holds the pipe open"
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_one_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "START_TIMEOUT_S", 0.1)
    with pytest.raises(LoadError, match="not ready after"), serving(["sleep", "1000"], 1):
        pass


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_the_bench_as_an_interrupt_does(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), ended_by_signals():
        signal.raise_signal(number)
    assert signal.getsignal(number) is before


@linux
def test_one_started_while_interrupts_are_ignored_can_be_interrupted(serve_program: list[str]) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        port = free_port()
        with ended_by_signals(), serving([*serve_program, str(port)], port) as found:
            ignored = Path(f"/proc/{found.pid}/status").read_text().split("SigIgn:")[1].split()[0]
        assert not int(ignored, 16) >> (signal.SIGINT - 1) & 1
    finally:
        signal.signal(signal.SIGINT, before)


@linux
def test_memory_is_of_the_whole_family() -> None:
    with serving(["sh", "-c", f'{sys.executable} -c "{READY}; signal.pause()" & wait'], 1) as found:
        whole = rss_mb(found.pid)
        assert whole is not None
        assert whole > 5
    assert rss_mb(2**30) is None


@linux
def test_our_own_processor_time_is_not_a_strangers() -> None:
    everyone, but_us = others_cpu_s([]), others_cpu_s([os.getpid()])
    assert everyone is not None
    assert but_us is not None
    assert everyone > but_us
