"""What a fuzzer found the admin API to stumble over."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from support.steered import new_store, steered

from specserve.deployments.controller import Controller

PUT = ("PUT", "policies", {})
HUGE = "9" * 30


@pytest.mark.parametrize(
    ("method", "path", "headers", "body"),
    [
        ("GET", f"policies?before={HUGE}", {}, None),
        ("GET", f"audit?before={HUGE}", {}, None),
        ("POST", "policies:dry-run", {}, {"version": int(HUGE)}),
        ("PUT", "policies", {"If-Match": "\xb2".encode("latin-1")}, {"policy": "off", "reason": "x"}),
        ("PUT", "policies", {"If-Match": "9" * 5000}, {"policy": "off", "reason": "x"}),
        (*PUT, {"policy": {"name": "\ud800"}, "reason": "x"}),
        (*PUT, {"policy": {"\ud800": 1}, "reason": "x"}),
        (*PUT, {"policy": {"tiers": {"\ud800": {}}}, "reason": "x"}),
        (*PUT, {"policy": "\ud800", "reason": "x"}),
        (*PUT, {"policy": {"tiers": {"default": {"weight": 10**400}}}, "reason": "x"}),
        (*PUT, {"policy": "off", "reason": "\ud800"}),
        ("POST", "policies:validate", {}, {"policy": {"\ud800": 1}}),
    ],
)
def test_what_cannot_be_stored_or_said_is_refused_and_changes_nothing(
    tmp_path: Path, method: str, path: str, headers: Any, body: Any
) -> None:
    async def story() -> None:
        async with steered(Controller(new_store(tmp_path))) as service:
            content = None if body is None else json.dumps(body)
            answer = await service.client.request(method, f"/admin/v1/{path}", content=content, headers=headers)
            assert answer.status_code == 400
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            assert (await service.ask("GET", "policies"))["active"]["version"] == 1
            assert await service.ask("GET", "state")
            assert await service.ask("GET", "audit")

    asyncio.run(asyncio.wait_for(story(), 60))
