"""The admin API of one service. It knows the `Controller` and HTTP, and no Ray."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Header, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from specserve.policies.document import Policy, policy_from_dict, policy_to_dict, simple_policy
from specserve.service.errors import BadRequestError, SpecserveError

from ..api.errors import answer_error
from ..api.limits import NO_TEXT, is_text
from ..api.reply import VERSION
from ..api.request_id import RequestIdMiddleware
from ..controller import Controller
from ..credentials import Credentials, Principal
from ..differences import differences
from ..policystore import Note, PolicyStore
from ..rollout import Rollout
from .access import note, reading, writing
from .dryrun import dry_run
from .schemas import (
    MAX_NUMBER,
    Activation,
    DryRun,
    OverrideSent,
    PolicyChange,
    PolicyQuestion,
    PolicySent,
    Reasoned,
    Stop,
)

PREVIOUS = "previous"
Noting = Callable[..., Awaitable[Callable[[str], Note]]]
_MOST_LISTED = 500
Limit = Annotated[int, Query(ge=1, le=_MOST_LISTED)]
Before = Annotated[int | None, Query(ge=1, le=MAX_NUMBER)]


def build_admin(controller: Controller, credentials: Credentials) -> FastAPI:
    """Return the app that steers `controller`; every route but `/health` asks for a key where there are keys."""
    app = FastAPI(title="specserve admin", version=VERSION, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(RequestIdMiddleware)
    for kind in (RequestValidationError, HTTPException, SpecserveError, Exception):
        app.add_exception_handler(kind, answer_error)
    router = APIRouter(prefix="/admin/v1", dependencies=[Depends(reading(credentials))])
    may_write = writing(credentials)

    async def noted(request: Request, principal: Annotated[Principal, Depends(may_write)]) -> Callable[[str], Note]:
        return lambda reason: note(request, principal, controller.now_s(), reason)

    _add_views(router, controller)
    _add_trials(router, controller)
    _add_changes(router, controller, noted)
    _add_overrides(router, controller, noted)
    app.include_router(router)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    return app


def _add_views(router: APIRouter, controller: Controller) -> None:
    store = controller.store

    @router.get("/state")
    async def state() -> dict[str, Any]:
        return controller.state()

    @router.get("/policies")
    async def policies(response: Response, limit: Limit = 20, before: Before = None) -> dict[str, Any]:
        desired = controller.desired
        active = desired.rollout.active
        response.headers["ETag"] = f'"{active}"'
        listed = [] if controller.store_error else await asyncio.to_thread(store.versions, limit, before)
        return {
            "active": {"version": active, "policy": desired.documents[active]},
            "canary": desired.rollout.canary,
            "shadow": desired.rollout.shadow,
            "versions": [
                {"version": one.version, "name": one.document["name"], "created_s": one.created_s,
                 "actor": one.actor, "reason": one.reason}
                for one in listed
            ],
        }  # fmt: skip

    @router.get("/policies/{version}")
    async def policy(version: str) -> dict[str, Any]:
        found = await asyncio.to_thread(store.version, await _number(version, store))
        return {
            "version": found.version,
            "policy": found.document,
            "created_s": found.created_s,
            "actor": found.actor,
            "reason": found.reason,
            "active": found.version == controller.desired.rollout.active,
        }

    @router.get("/audit")
    async def audit(limit: Limit = 50, before: Before = None) -> dict[str, Any]:
        entries = await asyncio.to_thread(store.audit, limit, before)
        return {"entries": entries, "next_before": entries[-1].entry_id if len(entries) == limit else None}

    @router.get("/decisions/{request_id}")
    async def decisions(request_id: str) -> dict[str, Any]:
        answers = await controller.ask("decisions", request_id=request_id)
        found = [{"cell": cell, **one} for cell, tracks in answers.items() for one in tracks]
        if not found:
            raise HTTPException(404, f"no cell remembers a decision about {request_id!r}")
        return {**found[0], "choices": found}


def _add_trials(router: APIRouter, controller: Controller) -> None:
    @router.post("/policies:validate")
    async def validate(body: PolicyQuestion) -> dict[str, Any]:
        document = policy_to_dict(_parsed(body.policy))
        active = controller.desired.rollout.active
        diff = differences(controller.desired.documents[active], document)
        return {"valid": True, "policy": document, "against": active, "diff": diff}

    @router.post("/policies:dry-run")
    async def try_out(body: DryRun) -> dict[str, Any]:
        if body.version is not None:
            stored = await asyncio.to_thread(controller.store.version, body.version)
            candidate = policy_from_dict(stored.document)
        else:
            assert body.policy is not None
            candidate = _parsed(body.policy)
        active = controller.snapshot.active
        recordings = await controller.ask("rounds", num_rounds=body.rounds)
        found = await asyncio.to_thread(dry_run, recordings, candidate, active.policy)
        diff = differences(policy_to_dict(active.policy), policy_to_dict(candidate))
        return {"against": active.version, "diff": diff, **found}


def _add_changes(router: APIRouter, controller: Controller, noted: Noting) -> None:
    Noted = Annotated[Callable[[str], Note], Depends(noted)]

    @router.put("/policies")
    async def put(
        body: PolicyChange, response: Response, by: Noted, if_match: Annotated[str | None, Header()] = None
    ) -> dict[str, Any]:
        expected, why = _expected(if_match), by(body.reason)
        try:
            document = policy_to_dict(_parsed(body.policy))
        except BadRequestError as error:
            await controller.refuse("apply", why, error)
            raise

        def work(store: PolicyStore) -> int:
            return store.replace(document, why, expected) if body.activate else store.add(document, why, expected)

        version = await controller.change("apply" if body.activate else "store", why, work)
        response.headers["ETag"] = f'"{controller.desired.rollout.active}"'
        return {"version": version, "active": body.activate}

    @router.post("/policies/{version}:activate")
    async def activate(version: str, body: Activation, by: Noted) -> dict[str, Any]:
        number = await _number(version, controller.store)

        def change(now: Rollout) -> Rollout:
            if body.canary is not None:
                return replace(now, canary=body.canary.of(number))
            if body.shadow:
                return replace(now, shadow=number)
            return Rollout(number, None, None if now.shadow == number else now.shadow)

        action = "canary" if body.canary is not None else "shadow" if body.shadow else "activate"
        return await _rolled_out(controller, change, action, by(body.reason))

    @router.post("/policies:rollback")
    async def roll_back(body: Reasoned, by: Noted) -> dict[str, Any]:
        why = by(body.reason)

        def work(store: PolicyStore) -> Rollout:
            if store.desired().rollout.canary is not None:
                return store.roll_out(lambda now: replace(now, canary=None), "rollback", why)
            previous = store.previous_active()
            if previous is None:
                raise BadRequestError("no other version was ever active", None, "nothing_to_roll_back")
            return store.roll_out(lambda now: Rollout(previous, None, now.shadow), "rollback", why)

        return _rollout_body(await controller.change("rollback", why, work))

    @router.post("/policies:stop")
    async def stop(body: Stop, by: Noted) -> dict[str, Any]:
        def change(now: Rollout) -> Rollout:
            return replace(now, canary=None) if body.role == "canary" else replace(now, shadow=None)

        return await _rolled_out(controller, change, f"stop {body.role}", by(body.reason))


def _add_overrides(router: APIRouter, controller: Controller, noted: Noting) -> None:
    Noted = Annotated[Callable[[str], Note], Depends(noted)]

    @router.get("/overrides")
    async def overrides() -> dict[str, Any]:
        return {"overrides": controller.overrides}

    @router.post("/overrides")
    async def override(body: OverrideSent, by: Noted) -> dict[str, Any]:
        why = by(body.reason)
        expires_s = None if body.ttl_s is None else why.at_s + body.ttl_s
        made = await controller.change("override", why, lambda store: store.override(body.tier, expires_s, why))
        return {"override": made}

    async def end(override_id: int | None, reason: str, by: Callable[[str], Note]) -> dict[str, Any]:
        why = by(reason)
        ended = await controller.change("end_override", why, lambda store: store.end_overrides(override_id, why))
        return {"ended": ended}

    @router.delete("/overrides")
    async def end_all(by: Noted, body: Reasoned | None = None) -> dict[str, Any]:
        return await end(None, "" if body is None else body.reason, by)

    @router.delete("/overrides/{override_id}")
    async def end_one(override_id: int, by: Noted, body: Reasoned | None = None) -> dict[str, Any]:
        return await end(override_id, "" if body is None else body.reason, by)


async def _rolled_out(
    controller: Controller, change: Callable[[Rollout], Rollout], action: str, why: Note
) -> dict[str, Any]:
    rollout = await controller.change(action, why, lambda store: store.roll_out(change, action, why))
    return _rollout_body(rollout)


def _rollout_body(rollout: Rollout) -> dict[str, Any]:
    return {"version": rollout.active, "canary": rollout.canary, "shadow": rollout.shadow}


async def _number(version: str, store: PolicyStore) -> int:
    """Return the number meant by `3` or `previous`. Raises BadRequestError for anything else."""
    if version == PREVIOUS:
        found = await asyncio.to_thread(store.previous_active)
        if found is None:
            raise BadRequestError("no other version was ever active", "version", "version_not_found")
        return found
    if not (version.isascii() and version.isdigit() and len(version) < 16):
        raise BadRequestError(f"a version is a number or `{PREVIOUS}`, not {version!r}", "version")
    return int(version)


def _parsed(sent: PolicySent) -> Policy:
    """Return the policy sent. Raises BadRequestError naming the field."""
    if not is_text(sent):
        raise BadRequestError(f"policy {NO_TEXT}", "policy", "invalid_policy")
    try:
        return simple_policy(sent) if isinstance(sent, str) else policy_from_dict(sent)
    except ValueError as error:
        text = str(error)
        field, parted, _ = text.partition(": ")
        place = f"policy.{field}" if parted and field != "policy" else "policy"
        raise BadRequestError(text, place, "invalid_policy") from error


def _expected(if_match: str | None) -> int | None:
    """Return the version that `If-Match` names; None without one."""
    if if_match is None or if_match.strip() == "*":
        return None
    tag = if_match.strip().removeprefix("W/").strip('"')
    if not (tag.isascii() and tag.isdigit() and len(tag) < 16):
        raise BadRequestError(f"If-Match holds the ETag of GET /admin/v1/policies, not {if_match!r}", "If-Match")
    return int(tag)
