"""AIPerf, which reads the answers' `metrics` by itself: its speculation table is `/metrics` to the token."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.official import MODEL
from support.thirdparty import Environment, scraped

from specserve.load.server import Server
from specserve.service.models import embedded_dir

pytestmark = [pytest.mark.conformance, pytest.mark.filterwarnings("ignore")]
NUM_REQUESTS = 12
GAMMA = 4
BODY = {
    "ignore_eos": True,
    "service_tier": "priority",
    "speculation": {"mode": "on", "max_draft_tokens": GAMMA},
}
"""Added to every request; without `ignore_eos` lengths vary, and AIPerf warns."""


def test_its_speculation_numbers_are_the_servers(aiperf: Environment, server: Server, tmp_path: Path) -> None:
    before = scraped(server.url)
    ran = aiperf.run(
        "aiperf", "profile", "-m", MODEL, "-u", server.url, "--endpoint-type", "chat", "--streaming", "--tokenizer",
        str(embedded_dir("target")), "--use-server-token-count", "--concurrency", "2", "--request-count",
        str(NUM_REQUESTS), "--isl", "48", "--osl", "32", "--extra-inputs", json.dumps(BODY), "--api-key", "x",
        "--random-seed", "1", "--no-gpu-telemetry", "--artifact-dir", "out", "--ui", "none", cwd=tmp_path,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    assert "Spec Decode" in ran.stdout
    after = scraped(server.url)
    found: Any = json.loads((tmp_path / "out/profile_export_aiperf.json").read_text("utf-8"))

    def grown(name: str, **labels: str) -> float:
        return after.total(f"vllm:{name}_total", **labels) - before.total(f"vllm:{name}_total", **labels)

    assert found["completed_request_count"]["avg"] == grown("request_success") == NUM_REQUESTS
    assert found["total_spec_decode_steps"]["avg"] == grown("spec_decode_num_drafts") > 0
    assert found["total_draft_tokens"]["avg"] == grown("spec_decode_num_draft_tokens")
    assert found["total_accepted_draft_tokens"]["avg"] == grown("spec_decode_num_accepted_tokens") > 0
    assert found["total_usage_completion_tokens"]["avg"] == grown("generation_tokens")
    assert found["total_usage_prompt_tokens"]["avg"] == grown("prompt_tokens")
    histogram = {int(k): count for k, count in found["pooled_spec_decode_acceptance_histogram"].items()}
    for place in range(GAMMA):
        reached = sum(count for k, count in histogram.items() if k > place)
        assert grown("spec_decode_num_accepted_tokens_per_pos", position=str(place)) == reached
