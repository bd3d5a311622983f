"""One service in a process of its own, and the environments of the third parties that talk to it."""

from collections.abc import Iterator

import pytest
from support.thirdparty import Environment, environment

from specserve.load.server import Server, free_port, serve_command, serving

SETTINGS = "max_model_len: 512\ndtype: float32\nnum_threads: 1\n"


@pytest.fixture(scope="session")
def contract() -> Environment:
    return environment("contract")


@pytest.fixture(scope="session")
def clients() -> Environment:
    return environment("clients")


@pytest.fixture(scope="session")
def aiperf() -> Environment:
    return environment("aiperf")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = tmp_path_factory.mktemp("serve") / "settings.yaml"
    settings.write_text(SETTINGS)
    port = free_port()
    with serving([*serve_command(None, "inline", port), "--config", str(settings)], port) as running:
        yield running
