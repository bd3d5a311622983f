"""A scrape reaches one cell and shows all of them: its own counters now, the others' as they last reported."""

import pickle
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
from support.cells import FixedPlanner
from support.rounds import Guessing, TokenRounds, token_engine, tokenizer
from support.scrape import Samples, scrape
from support.steered import new_store

from specserve.deployments.api.app import build_api
from specserve.deployments.api.backend import AnswerStyle, CellSnapshot
from specserve.deployments.backend import EngineBackend
from specserve.deployments.controller import Controller
from specserve.deployments.exchange import Report


def cell(name: str) -> EngineBackend:
    async def nothing() -> None:
        pass

    engine = token_engine(TokenRounds(64, 4), FixedPlanner("guessing", 4), [Guessing(0.7)])
    backend = EngineBackend(engine, "tiny", tokenizer(), nothing, AnswerStyle())
    backend.cell_id = name
    return backend


async def answered(backend: EngineBackend, num_tokens: int) -> Samples:
    """Let the cell generate so many tokens and return what a scrape of it shows."""
    await backend.start()
    transport = httpx.ASGITransport(build_api(backend))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        body = {"model": "tiny", "prompt": [3, 4, 5], "ignore_eos": True, "max_tokens": num_tokens}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        samples = await scrape(client)
    await backend.engine.stop()
    return samples


@pytest.mark.asyncio
async def test_every_cell_is_shown_by_name_whichever_is_asked(tmp_path: Path) -> None:
    here, there, controller = cell("here"), cell("there"), Controller(new_store(tmp_path))
    await answered(there, 9)
    for told in (there, here):
        metrics = pickle.loads(pickle.dumps(told.snapshot()))
        await controller.exchange(told.cell_id, Report({}, None, metrics=metrics))

    async def peers() -> Sequence[CellSnapshot]:
        return controller.metrics("here")

    here.peers = peers
    samples = await answered(here, 7)
    assert samples.value("vllm:generation_tokens_total", engine="here") == 7
    assert samples.value("vllm:generation_tokens_total", engine="there") == 9
    for name in ("here", "there"):
        assert samples.value("gen_ai_server_request_duration_seconds_count", engine=name) == 1
        assert samples.value("specserve_http_responses_total", engine=name, route="/v1/completions") == 1
    assert samples.value("specserve_policy_version_info") == 2


@pytest.mark.asyncio
async def test_without_the_controller_a_cell_shows_itself(caplog: pytest.LogCaptureFixture) -> None:
    async def gone() -> Sequence[CellSnapshot]:
        raise ConnectionError("gone")

    here = cell("here")
    here.peers = gone
    samples = await answered(here, 5)
    assert samples.value("vllm:generation_tokens_total") == 5
    assert "nothing is known of the other cells" in caplog.text
