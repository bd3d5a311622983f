"""OpenAI's specification, read by tools that know nothing of this project."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.official import MODEL, cut
from support.thirdparty import Environment, scraped

from specserve.load.server import Server

pytestmark = [pytest.mark.conformance, pytest.mark.filterwarnings("ignore")]
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
NOT_SERVED = {"chat-image-input", "chat-tool-calling"}
"""Images are refused, and the embedded model cannot decide to call a tool."""
TALKS_ON = "finish_reason: expected 'stop', got 'length'"
"""The embedded model knows no better than to go on; that is no fault of the surface."""


def test_schemathesis_finds_no_fault_with_openais_own_specification(
    contract: Environment, server: Server, tmp_path: Path
) -> None:
    spec = json.loads((contract.packages / "llm_comply/specs/openai_chat.json").read_text("utf-8"))
    (tmp_path / "cut.json").write_text(json.dumps(cut(spec)))
    ran = contract.run(
        "st", "run", "cut.json", "--url", f"{server.url}/v1", "-H", "Authorization: Bearer x", "--checks", CHECKS,
        "--phases", "examples,fuzzing", "--mode", "all", "--max-examples", "25", "--seed", "1", "--request-timeout",
        "30", cwd=tmp_path,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    after = scraped(server.url)
    for route in ("/v1/completions", "/v1/chat/completions"):
        assert after.total("specserve_http_responses_total", route=route, status="200") > 5
        assert after.total("specserve_http_responses_total", route=route, status="400") > 5


def test_llm_comply_has_nothing_against_what_is_served(contract: Environment, server: Server, tmp_path: Path) -> None:
    ran = contract.run(
        "llm-comply", "--format", "openai-chat", "-u", f"{server.url}/v1", "-k", "x", "-m", MODEL, "--json",
        cwd=tmp_path,
    )  # fmt: skip
    found: Any = json.loads(ran.stdout)
    assert len(found["results"]) >= 9
    failed = {
        test["id"]: test["errors"]
        for test in found["results"]
        if test["status"] == "failed" and test["id"] not in NOT_SERVED and test["errors"] != [TALKS_ON]
    }
    assert failed == {}
