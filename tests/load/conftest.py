"""A fake server in a thread, and the programs that stand in for the processes a bench starts."""

import importlib.util
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent


def _fake_serve() -> Any:
    spec = importlib.util.spec_from_file_location("fake_serve", FOLDER / "fake_serve.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fake_serve"] = module
    spec.loader.exec_module(module)
    return module


FAKE_SERVE = _fake_serve()


@pytest.fixture
def fake() -> Any:
    """What the fake server answers; a test may change it."""
    return FAKE_SERVE.FakeModel()


@pytest.fixture
def url(fake: Any) -> Iterator[str]:
    """The address of a running fake server."""
    server = FAKE_SERVE.serving(fake)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def serve_program() -> list[str]:
    """The command of a stand-in for `specserve serve`, without its port."""
    return [sys.executable, str(FOLDER / "fake_serve.py")]


@pytest.fixture
def rival_program() -> list[str]:
    """The command of a stand-in for transformers' process."""
    return [sys.executable, str(FOLDER / "fake_rival.py")]
