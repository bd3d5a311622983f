"""Proposer replicas are there while drafts are wanted: the kill switch takes them down, its end brings them back."""

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.service import Service

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]

PROMPT = "def parse(self, line):\n    "
WISH = {"mode": "on", "max_draft_tokens": 3, "proposer": "draft"}
PATIENCE_S = 120.0


def admin(service: Service, method: str, path: str, **sent: Any) -> Any:
    url = f"http://{service.settings.host}:{service.settings.admin_port}/admin/v1/{path}"
    answer = httpx.request(method, url, timeout=60, **sent)
    assert answer.status_code == 200, answer.text
    return answer.json()


def body(**changes: Any) -> dict[str, Any]:
    base = {"model": "specserve-embedded", "prompt": PROMPT, "max_tokens": 300, "temperature": 0}
    return {**base, "ignore_eos": True, "speculation": WISH, **changes}


def complete(service: Service) -> dict[str, Any]:
    answer = httpx.post(f"{service.url}/v1/completions", json=body(), timeout=120)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def num_drafted(answer: dict[str, Any]) -> int:
    return int(answer["metrics"]["speculative_decoding"]["num_draft_tokens"])


def answers(service: Service) -> Iterator[dict[str, Any]]:
    """Answers to the same request, streamed one after the other, for as long as anybody waits."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        with httpx.stream("POST", f"{service.url}/v1/completions", json=body(stream=True), timeout=120) as answer:
            assert answer.status_code == 200
            text, last = "", {}
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    last = json.loads(line.removeprefix("data: "))
                    assert "error" not in last, last
                    text += last["choices"][0]["text"] if last["choices"] else ""
            yield {"text": text, **last}
    raise AssertionError("what was waited for did not happen")


def num_replicas() -> int:
    """Return how many proposer replicas Serve has, those that start or stop included."""
    from ray import serve

    return sum(serve.status().applications["specserve"].deployments["Proposer"].replica_states.values())


def test_the_kill_switch_takes_the_proposers_down_and_its_end_brings_them_back_under_running_streams(
    service: Service,
) -> None:
    first = next(one for one in answers(service) if num_drafted(one))
    text, pid = first["text"], service.pids()["proposer"]

    admin(service, "POST", "overrides", json={"speculation": "off", "reason": "a test"})
    try:
        for one in answers(service):
            assert one["text"] == text
            if num_replicas() == 0:
                break
        assert num_drafted(complete(service)) == 0
        assert "proposer" not in service.pids()
        assert not alive(pid)
    finally:
        admin(service, "DELETE", "overrides")
    for one in answers(service):
        assert one["text"] == text
        if num_drafted(one):
            break
    assert num_replicas() == 1
    assert service.pids()["proposer"] != pid


def alive(pid: int) -> bool:
    """Return whether a process is there and is no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
