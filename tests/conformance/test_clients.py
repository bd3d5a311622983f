"""Clients that people put between themselves and a model: they get the same text, whole and streamed."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.thirdparty import Environment

from specserve.load.server import Server

pytestmark = [pytest.mark.conformance, pytest.mark.filterwarnings("ignore")]
HERE = Path(__file__).parent


def talk(clients: Environment, script: str, server: Server, folder: Path) -> Any:
    ran = clients.run("python", str(HERE / script), server.url, cwd=folder, LITELLM_LOCAL_MODEL_COST_MAP="True")
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout.splitlines()[-1])


def test_langchain_reads_text_usage_and_the_tier_served(clients: Environment, server: Server, tmp_path: Path) -> None:
    told = talk(clients, "talk_langchain.py", server, tmp_path)
    assert told["text"]
    assert told["text"] == told["streamed"]
    assert told["tier"] == "priority"
    assert 0 < told["usage"]["output_tokens"] <= 12
    assert told["streamed_usage"]["output_tokens"] == told["usage"]["output_tokens"]


def test_litellm_reads_both_endpoints_and_the_errors(clients: Environment, server: Server, tmp_path: Path) -> None:
    told = talk(clients, "talk_litellm.py", server, tmp_path)
    assert told["text"]
    assert told["text"] == told["streamed"]
    assert 0 < told["usage"] <= 12
    assert told["completed"]
    assert told["refused"] == 404
