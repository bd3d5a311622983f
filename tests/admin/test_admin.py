"""The admin API: versions, conflicts, trials, overrides, audit, decisions; and a cell follows at once."""

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.steered import Steered, new_store, steered

from specserve.deployments.controller import Controller
from specserve.deployments.credentials import Credentials, key_hash, new_key
from specserve.deployments.exchange import Reply
from specserve.deployments.guard import Tally

KEY = "an admin key of some length"


class Clock:
    """Unix time that only a test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def run(folder: Path, story: Callable[[Steered, Clock], Any], credentials: Credentials | None = None) -> None:
    async def main() -> None:
        clock = Clock()
        async with steered(Controller(new_store(folder), clock), credentials) as service:
            await story(service, clock)

    asyncio.run(asyncio.wait_for(main(), 60))


async def applied(service: Steered) -> None:
    """Wait until the cell follows what the controller says."""
    while service.planner.snapshot is None or service.planner.snapshot.revision != service.controller.snapshot.revision:
        await asyncio.sleep(0.01)


def test_a_policy_that_is_put_is_active_has_an_etag_and_governs_the_next_round(tmp_path: Path) -> None:
    async def story(service: Steered, clock: Clock) -> None:
        before = await service.client.get("/admin/v1/policies")
        assert (before.json()["active"]["version"], before.headers["etag"]) == (1, '"1"')
        assert service.play("a") == [(3, "fixed")]
        sent = {"policy": {"name": "night", "tiers": {"default": {"law": "fixed", "gamma": 5}}}, "reason": "night"}
        put = await service.client.put("/admin/v1/policies", json=sent, headers={"If-Match": before.headers["etag"]})
        assert (put.status_code, put.json()["version"], put.headers["etag"]) == (200, 2, '"2"')
        await applied(service)
        assert service.play("a") == [(5, "fixed")]
        active = (await service.ask("GET", "policies"))["active"]
        assert (active["version"], active["policy"]["name"]) == (2, "night")
        again = await service.client.put("/admin/v1/policies", json=sent, headers={"If-Match": '"1"'})
        assert (again.status_code, again.json()["error"]["code"]) == (412, "version_conflict")
        assert (await service.ask("GET", "policies/1"))["policy"]["name"] == "fixed:3"
        assert (await service.client.get("/admin/v1/policies/9")).status_code == 404
        audit = (await service.ask("GET", "audit"))["entries"]
        assert [(one["action"], one["actor"], one["result"].split(":")[0]) for one in audit] == [
            ("apply", "anyone", "refused"),
            ("apply", "anyone", "done"),
            ("start", "start", "done"),
        ]

    run(tmp_path, story)


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        ({"policy": {"tiers": {"default": {"law": "magic"}}}, "reason": "x"}, "policy.tiers.default.law"),
        ({"policy": {"tires": {}}, "reason": "x"}, "policy.tires"),
        ({"policy": "fixed:9999", "reason": "x"}, "policy"),
        ({"policy": {}}, "reason"),
        ({"policy": {}, "reason": "  "}, "reason"),
        ({"reason": "x"}, "policy"),
        ({"policy": {}, "reason": "x", "colour": "red"}, "colour"),
    ],
)
def test_what_cannot_be_a_policy_is_refused_by_field_and_changes_nothing(
    sent: dict[str, Any], param: str, tmp_path: Path
) -> None:
    async def story(service: Steered, clock: Clock) -> None:
        answer = await service.client.put("/admin/v1/policies", json=sent)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param)
        assert set(error) == {"message", "type", "param", "code"}
        assert (await service.ask("GET", "policies"))["active"]["version"] == 1

    run(tmp_path, story)


def test_validation_shows_the_difference_and_stores_nothing(tmp_path: Path) -> None:
    async def story(service: Steered, clock: Clock) -> None:
        found = await service.ask("POST", "policies:validate", json={"policy": "fixed:4"})
        assert {"op": "replace", "path": "/tiers/default/gamma", "value": 4} in found["diff"]
        bad = await service.client.post("/admin/v1/policies:validate", json={"policy": {"limits": {"min_gain": -1}}})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "policy.limits.min_gain")
        assert [one["version"] for one in (await service.ask("GET", "policies"))["versions"]] == [1]

    run(tmp_path, story)


def test_a_dry_run_tells_what_would_change_and_acts_on_nothing(tmp_path: Path) -> None:
    async def story(service: Steered, clock: Clock) -> None:
        service.play("a", "b", rounds=30)
        asked = {"policy": "fixed:6", "rounds": 20}
        found = await service.ask("POST", "policies:dry-run", json=asked)
        assert (found["rounds"], found["decisions"], found["changed"], found["cells"]) == (20, 40, 40, 1)
        assert (found["candidate"]["gammas"], found["active"]["gammas"]) == ({"6": 40}, {"3": 40})
        assert found["recorded"]["gammas"] == {"3": 40}
        assert found["candidate"]["tokens_per_step"] > found["active"]["tokens_per_step"] > 1.0
        same = await service.ask("POST", "policies:dry-run", json={"version": 1})
        assert (same["changed"], same["decisions"]) == (0, 60)
        assert service.play("a") == [(3, "fixed")]
        neither = await service.client.post("/admin/v1/policies:dry-run", json={})
        assert neither.status_code == 400

    run(tmp_path, story)


def test_versions_are_staged_activated_and_rolled_back(tmp_path: Path) -> None:
    async def story(service: Steered, clock: Clock) -> None:
        staged = await service.ask("PUT", "policies", json={"policy": "fixed:5", "reason": "x", "activate": False})
        assert staged == {"version": 2, "active": False}
        assert service.play("a") == [(3, "fixed")]
        assert (await service.ask("POST", "policies/2:activate", json={"reason": "x"}))["version"] == 2
        await applied(service)
        assert service.play("a") == [(5, "fixed")]
        assert (await service.ask("POST", "policies:rollback", json={"reason": "slow"}))["version"] == 1
        await applied(service)
        assert service.play("a") == [(3, "fixed")]
        assert (await service.ask("POST", "policies/previous:activate", json={"reason": "x"}))["version"] == 2
        missing = await service.client.post("/admin/v1/policies/7:activate", json={"reason": "x"})
        assert (missing.status_code, missing.json()["error"]["param"]) == (404, "version")
        silent = await service.client.post("/admin/v1/policies:rollback", json={})
        assert (silent.status_code, silent.json()["error"]["param"]) == (400, "reason")

    run(tmp_path, story)


def test_the_kill_switch_silences_running_requests_until_it_expires_or_is_ended(tmp_path: Path) -> None:
    async def story(service: Steered, clock: Clock) -> None:
        sent = {"speculation": "off", "ttl_s": 60, "reason": "incident", "tier": "flex"}
        made = (await service.ask("POST", "overrides", json=sent))["override"]
        assert (made["tier"], made["expires_s"]) == ("flex", 1060.0)
        await applied(service)
        assert service.play("a", tier="flex") == [(0, "override")]
        assert service.play("b") == [(3, "fixed")]
        clock.now_s = 1060.0
        await applied(service)
        assert service.play("a", tier="flex") == [(3, "fixed")]
        assert (await service.ask("GET", "overrides"))["overrides"] == []
        everywhere = await service.ask("POST", "overrides", json={"speculation": "off", "reason": "incident"})
        await applied(service)
        assert service.play("a", "b") == [(0, "override")] * 2
        ended = await service.ask("DELETE", f"overrides/{everywhere['override']['override_id']}", json={"reason": "ok"})
        assert ended == {"ended": 1}
        await applied(service)
        assert service.play("b") == [(3, "fixed")]
        assert await service.ask("DELETE", "overrides") == {"ended": 0}

    run(tmp_path, story)


def test_a_canary_is_rolled_back_by_its_guard_with_an_entry_in_the_audit(tmp_path: Path) -> None:
    async def story(service: Steered, clock: Clock) -> None:
        await service.ask("PUT", "policies", json={"policy": "fixed:5", "reason": "x", "activate": False})
        guard = {"tpot_p95_ms": 20.0, "min_requests": 10}
        canary = {"percent": 100, "tiers": ["flex"], "guard": guard}
        began = await service.ask("POST", "policies/2:activate", json={"reason": "try", "canary": canary})
        assert (began["version"], began["canary"]["version"]) == (1, 2)
        await applied(service)
        assert service.play("a", tier="flex") == [(5, "fixed")]
        assert service.play("b") == [(3, "fixed")]
        for number in range(10):
            service.play(f"f{number}", tier="flex")
            service.planner.ended(f"f{number}", False, 30.0)
        while (await service.ask("GET", "state"))["canary"] is not None:
            await asyncio.sleep(0.01)
        await applied(service)
        assert service.play("a", tier="flex") == [(3, "fixed")]
        while (newest := (await service.ask("GET", "audit?limit=1"))["entries"][0])["actor"] != "guard":
            await asyncio.sleep(0.01)  # the cells follow before the store has it
        assert (newest["actor"], newest["action"], newest["old_version"], newest["new_version"]) == (
            "guard", "rollback", 2, 1
        )  # fmt: skip
        assert "TPOT p95" in newest["reason"]
        assert (await service.ask("GET", "policies"))["canary"] is None

    run(tmp_path, story)


def test_a_canary_ends_in_the_cells_while_the_store_is_slow_and_is_stored_then(tmp_path: Path) -> None:
    async def story(service: Steered, clock: Clock) -> None:
        await service.ask("PUT", "policies", json={"policy": "fixed:5", "reason": "x", "activate": False})
        canary = {"percent": 100, "guard": {"tpot_p95_ms": 20.0, "min_requests": 1}}
        await service.ask("POST", "policies/2:activate", json={"reason": "try", "canary": canary})
        await applied(service)
        store, written = service.controller.store, threading.Event()
        roll_out = store.roll_out

        def slow_roll_out(*what: Any) -> Any:
            assert written.wait(30)
            return roll_out(*what)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "roll_out", slow_roll_out)
            service.play("a")
            service.planner.ended("a", False, 30.0)
            while service.play("b") != [(3, "fixed")]:
                await asyncio.sleep(0.01)
            assert await service.follower.once()
            assert (await service.ask("GET", "audit?limit=1"))["entries"][0]["actor"] == "anyone"
            written.set()
            while service.controller.desired != store.desired():
                await asyncio.sleep(0.01)
        assert (await service.ask("GET", "audit?limit=1"))["entries"][0]["actor"] == "guard"
        assert service.play("b") == [(3, "fixed")]

    run(tmp_path, story)


def test_a_shadow_is_counted_by_the_cells_and_stops_when_told(tmp_path: Path) -> None:
    async def story(service: Steered, clock: Clock) -> None:
        await service.ask("PUT", "policies", json={"policy": "fixed:5", "reason": "x", "activate": False})
        await service.ask("POST", "policies/2:activate", json={"reason": "watch", "shadow": True})
        await applied(service)
        assert service.play("a", rounds=4) == [(3, "fixed")]
        await service.follower.once()
        shadow = (await service.ask("GET", "state"))["cells"]["cell-1"]["shadow"]
        assert (shadow["version"], shadow["decisions"], shadow["changed"]) == (2, 4, 4)
        assert (await service.ask("POST", "policies:stop", json={"role": "shadow", "reason": "x"}))["shadow"] is None

    run(tmp_path, story)


def test_a_request_is_explained_by_the_cell_that_served_it(tmp_path: Path) -> None:
    async def story(service: Steered, clock: Clock) -> None:
        service.play("cmpl-1f-0", "cmpl-1f-1", rounds=5)
        found = await service.ask("GET", "decisions/cmpl-1f")
        assert [one["request_id"] for one in found["choices"]] == ["cmpl-1f-0", "cmpl-1f-1"]
        assert (found["cell"], found["decision"]["gamma"], found["law"]) == ("cell-1", 3, "fixed")
        assert found["gamma_track"][0]["rounds"] == 5
        assert (await service.client.get("/admin/v1/decisions/cmpl-2f")).status_code == 404

    run(tmp_path, story)


def test_the_state_shows_what_each_cell_does(tmp_path: Path) -> None:
    async def story(service: Steered, clock: Clock) -> None:
        service.play("a", "b", rounds=4)
        await service.follower.once()
        cell = (await service.ask("GET", "state"))["cells"]["cell-1"]
        assert (cell["live"], cell["up_to_date"], cell["rounds"], cell["policy_version"]) == (True, True, 7, 1)
        assert (cell["mean_batch"], cell["mean_gamma"]) == (2.0, 3.0)
        assert cell["acceptance_rate"] == {"default": 0.5}

    run(tmp_path, story)


def test_the_audit_comes_in_pages(tmp_path: Path) -> None:
    async def story(service: Steered, clock: Clock) -> None:
        for gamma in range(5):
            await service.ask("PUT", "policies", json={"policy": f"fixed:{gamma}", "reason": str(gamma)})
        first = await service.ask("GET", "audit?limit=4")
        rest = await service.ask("GET", f"audit?limit=4&before={first['next_before']}")
        assert [one["entry_id"] for one in first["entries"] + rest["entries"]] == [6, 5, 4, 3, 2, 1]
        assert rest["next_before"] is None

    run(tmp_path, story)


def test_a_damaged_store_refuses_changes_by_name_and_the_policy_stays(tmp_path: Path) -> None:
    async def story(service: Steered, clock: Clock) -> None:
        await service.ask("PUT", "policies", json={"policy": "fixed:5", "reason": "x"})
        await applied(service)
        path = service.controller.store.path
        for extra in ("-wal", "-shm"):
            path.with_name(path.name + extra).unlink(missing_ok=True)
        path.write_bytes(b"not a database" * 100)
        put = await service.client.put("/admin/v1/policies", json={"policy": "off", "reason": "x"})
        assert (put.status_code, put.json()["error"]["code"]) == (503, "store_unavailable")
        state = await service.ask("GET", "state")
        assert not state["store"]["writable"]
        assert (await service.ask("GET", "policies"))["active"]["version"] == 2
        assert service.play("a") == [(5, "fixed")]
        assert Controller(service.controller.store, clock).desired.documents[2]["name"] == "fixed:5"

    run(tmp_path, story)


def test_only_operators_change_and_only_known_keys_look(tmp_path: Path) -> None:
    async def story(service: Steered, clock: Clock) -> None:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            for method, path in (("GET", "policies"), ("GET", "audit"), ("DELETE", "overrides"), ("GET", "state")):
                assert (await service.client.request(method, f"/admin/v1/{path}", headers=headers)).status_code == 401
        assert (await service.client.get("/health")).status_code == 200
        service.client.headers["Authorization"] = f"Bearer {KEY}"
        await service.ask("PUT", "policies", json={"policy": "off", "reason": "x"})
        assert (await service.ask("GET", "audit"))["entries"][0]["actor"] == "admin"

    run(tmp_path, story, Credentials(None, KEY))


def test_a_viewer_looks_and_may_not_change_and_a_client_may_do_neither(tmp_path: Path) -> None:
    keys = {role: new_key() for role in ("viewer", "operator", "client")}
    file = tmp_path / "keys.json"
    entries = [{"id": f"the-{role}", "sha256": key_hash(key), "role": role} for role, key in keys.items()]
    file.write_text(json.dumps({"keys": entries}))

    async def story(service: Steered, clock: Clock) -> None:
        statuses = {}
        for role, key in keys.items():
            headers = {"Authorization": f"Bearer {key}"}
            got = await service.client.get("/admin/v1/state", headers=headers)
            sent = {"policy": "off", "reason": "x"}
            put = await service.client.put("/admin/v1/policies", json=sent, headers=headers)
            statuses[role] = (got.status_code, put.status_code)
        assert statuses == {"viewer": (200, 403), "operator": (200, 200), "client": (403, 403)}
        assert service.controller.store.audit(1)[0].actor == "the-operator"

    run(tmp_path, story, Credentials(str(file)))


def test_a_cell_keeps_the_last_snapshot_while_the_controller_is_gone(tmp_path: Path) -> None:
    async def story(service: Steered, clock: Clock) -> None:
        await service.ask("PUT", "policies", json={"policy": "fixed:5", "reason": "x"})
        await applied(service)
        answering = service.controller.exchange

        async def silent(cell_id: str, report: object) -> Reply:
            raise ConnectionError("nobody there")

        service.controller.exchange = silent  # type: ignore[method-assign, assignment]
        for minute_part in range(120):
            assert not await service.follower.once()
            assert service.play(f"r{minute_part}") == [(5, "fixed")]
        service.controller.exchange = answering  # type: ignore[method-assign]
        assert await service.follower.once()

    run(tmp_path, story)


def test_counts_that_began_again_are_taken_whole() -> None:
    before, after = Tally(finished=10, tested=5), Tally(finished=12, tested=9)
    assert after.since(before) == Tally(finished=2, tested=4)
    assert Tally(finished=3).since(before) == Tally(finished=3)


def test_an_unknown_route_is_an_openai_error(tmp_path: Path) -> None:
    async def story(service: Steered, clock: Clock) -> None:
        answer: httpx.Response = await service.client.get("/admin/v1/nothing")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")

    run(tmp_path, story)
