"""Operators steer real cells: a change reaches running requests, changes no token, and outlives the controller."""

import json
import os
import signal
from typing import Any

import httpx
import pytest
from support.service import Service

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]

PROMPT = "def parse(self, line):\n    "
MAX_TOKENS = 900


def admin(service: Service, method: str, path: str, **sent: Any) -> Any:
    url = f"http://{service.settings.host}:{service.settings.admin_port}/admin/v1/{path}"
    answer = httpx.request(method, url, timeout=60, **sent)
    assert answer.status_code == 200, answer.text
    return answer.json()


def complete(service: Service, mode: str) -> dict[str, Any]:
    sent = {"model": "specserve-embedded", "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0}
    body = {**sent, "ignore_eos": True, "speculation": {"mode": mode}}
    answer = httpx.post(f"{service.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def streamed(service: Service, changes: dict[int, Any]) -> tuple[str, str]:
    """Return the id and text of an answer during which `changes` happen, by number of the event."""
    sent = {"model": "specserve-embedded", "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0}
    body = {**sent, "ignore_eos": True, "stream": True, "speculation": {"mode": "auto"}}
    text, request_id = "", ""
    with httpx.stream("POST", f"{service.url}/v1/completions", json=body, timeout=120) as answer:
        for number, line in enumerate(line for line in answer.iter_lines() if line.startswith("data: {")):
            event = json.loads(line.removeprefix("data: "))
            text += event["choices"][0]["text"] if event["choices"] else ""
            request_id = event["id"]
            if number in changes:
                changes[number]()
    return request_id, text


def controller_pid() -> int:
    """Return the process id of the controller that answers; waits for one."""
    from ray import serve
    from ray.exceptions import RayError

    for _ in range(20):
        try:
            return int(serve.get_deployment_handle("Controller", "specserve").pid.remote().result(timeout_s=60))
        except RayError:
            continue
    raise AssertionError("no controller came back")


def test_changes_reach_a_running_request_keep_its_tokens_and_outlive_the_controller(service: Service) -> None:
    plain = complete(service, "off")["choices"][0]["text"]

    def put() -> None:
        admin(service, "PUT", "policies", json={"policy": "fixed:4", "reason": "a test"})

    def silence() -> None:
        admin(service, "POST", "overrides", json={"speculation": "off", "reason": "a test"})

    request_id, text = streamed(service, {5: put, 60: silence})
    assert text == plain
    track = admin(service, "GET", f"decisions/{request_id}")["gamma_track"]
    assert (4, "fixed") in {(part["gamma"], part["reason"]) for part in track}
    assert track[-1]["reason"] == "override"
    cells = admin(service, "GET", "state")["cells"].values()
    assert [cell["up_to_date"] for cell in cells if cell["live"]] == [True]
    dry = admin(service, "POST", "policies:dry-run", json={"policy": "fixed:2", "rounds": 50})
    assert dry["decisions"] == 50

    os.kill(controller_pid(), signal.SIGKILL)
    assert complete(service, "auto")["choices"][0]["text"] == plain
    assert controller_pid()
    while True:
        try:
            active = admin(service, "GET", "policies")["active"]
            break
        except httpx.TransportError:
            continue
    assert (active["policy"]["name"], admin(service, "DELETE", "overrides")["ended"]) == ("fixed:4", 1)
    admin(service, "PUT", "policies", json={"policy": "adaptive", "reason": "as it was"})
