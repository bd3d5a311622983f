"""One Ray and one service for the whole session: actors, float32, the embedded models, all proposers without heads."""

import socket
from collections.abc import Iterator

import httpx
import pytest
from support.service import Service

from specserve.deployments.localray import local_ray
from specserve.deployments.settings import ServiceSettings

PROPOSERS = ("prediction", "prompt_lookup", "suffix", "draft", "layer_skip", "early_exit")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    store = tmp_path_factory.mktemp("state") / "policies.db"
    settings = ServiceSettings(
        port=free_port(), admin_port=free_port(), policy_store=str(store), dtype="float32", num_pages=512,
        proposers=PROPOSERS, layer_skip=(3, 5), early_exit=6,
    )  # fmt: skip
    with local_ray(settings.host, settings.port):
        from ray import serve

        from specserve.deployments.app import build_app

        handle = serve.run(build_app(settings, b"a secret of this test session!!!"), name="specserve", route_prefix="/")
        running = Service(f"http://{settings.host}:{settings.port}", settings, handle)
        assert httpx.get(f"{running.url}/ready", timeout=30).status_code == 200
        yield running
