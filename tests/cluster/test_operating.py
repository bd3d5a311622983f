"""An operator's evening: thirty-two streams run while the policy is tried, activated, silenced and taken back."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from support.service import Service

from specserve.load.prompts import prompts

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]

NUM_STREAMS = 32
MAX_TOKENS = 96
PROMPTS = [one.text[:400] for workload in ("copy_heavy", "open_ended") for one in prompts(workload)]  # type: ignore[arg-type]
CANDIDATE = {"name": "evening", "tiers": {"default": {"law": "fixed", "gamma": 3}}, "proposers": ["prompt_lookup"]}


class Operator:
    """The admin port, as an operator uses it; every call must succeed."""

    def __init__(self, service: Service) -> None:
        self._base = f"http://{service.settings.host}:{service.settings.admin_port}/admin/v1/"

    async def ask(self, method: str, path: str, **sent: Any) -> Any:
        async with httpx.AsyncClient(timeout=60) as client:
            answer = await client.request(method, self._base + path, **sent)
        assert answer.status_code == 200, answer.text
        return answer.json()


async def stream(client: httpx.AsyncClient, prompt: str, seen: asyncio.Semaphore) -> str:
    """Return the whole text of one stream; tells `seen` of every event."""
    body = {
        "model": "specserve-embedded", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True,
        "stream": True,
    }  # fmt: skip
    text = ""
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                text += event["choices"][0]["text"] if event["choices"] else ""
                seen.release()
    return text


async def evening(service: Service, operator: Operator | None) -> list[str]:
    """Return the texts of all streams; the operator, if there is one, acts between their events."""
    seen = asyncio.Semaphore(0)

    async def after(num_events: int) -> None:
        for _ in range(num_events):
            await seen.acquire()

    async with httpx.AsyncClient(base_url=service.url, timeout=300) as client:
        streams = [asyncio.ensure_future(stream(client, PROMPTS[place], seen)) for place in range(NUM_STREAMS)]
        if operator is not None:
            await after(64)
            tried = await operator.ask("POST", "policies:dry-run", json={"policy": CANDIDATE, "rounds": 20})
            assert tried["decisions"] > 0
            await operator.ask("PUT", "policies", json={"policy": CANDIDATE, "reason": "quiet evening"})
            await after(96)
            await operator.ask("POST", "overrides", json={"speculation": "off", "reason": "to be sure"})
            await after(96)
            await operator.ask("DELETE", "overrides", json={"reason": "it was nothing"})
            await operator.ask("POST", "policies:rollback", json={"reason": "as it was"})
            assert not all(one.done() for one in streams)
        return list(await asyncio.gather(*streams))


def test_thirty_two_streams_do_not_notice_an_operator_and_the_audit_does(service: Service) -> None:
    operator = Operator(service)
    before = len(asyncio.run(operator.ask("GET", "audit"))["entries"])
    undisturbed = asyncio.run(evening(service, None))
    assert asyncio.run(evening(service, operator)) == undisturbed
    entries = asyncio.run(operator.ask("GET", "audit"))["entries"]
    added = entries[: len(entries) - before]
    assert [entry["reason"] for entry in added] == ["as it was", "it was nothing", "to be sure", "quiet evening"]
    assert all(entry["actor"] and entry["at_s"] for entry in added)
