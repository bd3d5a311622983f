"""Operators who look and change while everything runs: right, wrong, and in the worst order."""

from random import Random
from typing import Any

from .bodies import NASTY, encoded
from .shots import request
from .visiting import Shot

_TIERS = ("default", "priority", "flex")
_LAWS = ("off", "fixed", "schedule", "adaptive")
_LISTS = ("/admin/v1/policies", "/admin/v1/audit")


def policy(rng: Random) -> Any:
    """Return a policy that may be right."""
    if rng.random() < 0.3:
        return rng.choice(
            ("off", "adaptive", "fixed:4", "fixed:64", "fixed:0", "fixed:²", "fixed:99", "", "x", "\ud800")
        )
    tiers = {rng.choice(_TIERS): _tier(rng) for _ in range(rng.randint(0, 3))}
    limits = {
        "draft_tokens_per_round": lambda: rng.choice((0, 1, 64, 1_000_000)),
        "probe_duty": lambda: rng.choice((0, 0.05, 1)),
        "min_gain": lambda: rng.choice((0, 0.02, 5, 1e308)),
        "min_dwell_rounds": lambda: rng.choice((0, 1, 16, 1_000_000)),
        "forecast_s": lambda: rng.choice((0, 1e-300, 2, 10)),
    }
    document: dict[str, Any] = {
        "name": rng.choice(("a", "\x00", "é" * 500, "b")),
        "tiers": tiers,
        "proposers": rng.sample(("prediction", "prompt_lookup", "suffix", "draft", "eagle3", "x"), rng.randint(0, 5)),
        "limits": {name: make() for name, make in limits.items() if rng.random() < 0.3},
    }
    if rng.random() < 0.35:
        place = rng.choice((document, document["limits"], *tiers.values()))
        place[rng.choice((*sorted(place), "weight", "name", "\ud800", "law", "gamma", "rules"))] = rng.choice(NASTY)
    return document


def _tier(rng: Random) -> dict[str, Any]:
    ends = (0, 0.5, 4, 1e308)
    fields = {
        "law": lambda: rng.choice(_LAWS),
        "gamma": lambda: rng.choice((0, 1, 4, 64)),
        "max_gamma": lambda: rng.choice((0, 1, 8, 64)),
        "tpot_slo_ms": lambda: rng.choice((None, 1e-300, 30, 1e308)),
        "weight": lambda: rng.choice((1e-320, 1e-300, 1, 4, 1e308)),
        "rules": lambda: [
            {"gamma": rng.choice((0, 4, 64)), rng.choice(("qps", "batch", "acceptance")): {"above": rng.choice(ends)}}
            for _ in range(rng.randint(0, 3))
        ],
        "otherwise": lambda: rng.choice((0, 4, 64)),
    }
    return {name: make() for name, make in fields.items() if rng.random() < 0.6}


def operator_shot(rng: Random) -> Shot:
    """Return a request for the admin port."""
    number = rng.choice(("1", "2", "previous", "0", "-1", "x", "%C2%B2", "9" * 20, "9" * 5000, "%00"))
    reason = rng.choice(("why not", "why not", "why not", "", "\ud800", "x" * 2000, 5))
    why: dict[str, Any] = {"reason": reason}
    draw = rng.randrange(11)
    method, path, body, headers = "POST", "", dict[str, Any](), []
    if draw == 0:
        method = rng.choice(("GET", "GET", "GET", "HEAD", "OPTIONS", "POST"))
        path = rng.choice(("/admin/v1/state", "/health", "/", "/admin/v1/overrides", f"/admin/v1/policies/{number}",
                           "/admin/v1/decisions/none", "/admin/v1/decisions/%ff", "/admin//v1/state"))  # fmt: skip
    elif draw == 1:
        least = rng.choice(("1", "0", "501", "-1", "9" * 30, "x"))
        method, path = "GET", f"{rng.choice(_LISTS)}?limit={rng.choice(('1', '500', least))}&before={least}"
    elif draw <= 4:
        method, path, body = "PUT", "/admin/v1/policies", {**why, "policy": policy(rng)}
        if rng.random() < 0.3:
            body["activate"] = rng.choice((True, False, "x", None))
        if rng.random() < 0.3:
            headers = [
                "If-Match: " + rng.choice(('"1"', "*", "x", "\xb2", '"' + "9" * 30 + '"', "9" * 5000, 'W/"2"', ""))
            ]
    elif draw == 5:
        canary = {"percent": rng.choice((0.001, 50, 100, *NASTY[:16])), "tiers": rng.choice(([], ["flex"], NASTY[17]))}
        body = {**why, **rng.choice(({}, {"shadow": True}, {"canary": canary}, {"canary": canary, "shadow": True}))}
        path = f"/admin/v1/policies/{number}:activate"
    elif draw == 6:
        path, body = "/admin/v1/policies:rollback", why
    elif draw == 7:
        path, body = "/admin/v1/policies:stop", {**why, "role": rng.choice(("canary", "shadow", "x"))}
    elif draw == 8:
        ttl = rng.choice((None, 0.01, 1, 2, 0, *NASTY[:16]))
        body = {**why, "speculation": rng.choice(("off", "off", "on")), "tier": rng.choice((None, *_TIERS, "\ud800"))}
        path, body = "/admin/v1/overrides", body | ({} if ttl is None else {"ttl_s": ttl})
    elif draw == 9:
        method, path = "DELETE", rng.choice(("/admin/v1/overrides", f"/admin/v1/overrides/{number}"))
        body = why
    else:
        path = rng.choice(("/admin/v1/policies:validate", "/admin/v1/policies:dry-run"))
        body = {"policy": policy(rng)} if rng.random() < 0.8 else {"version": rng.choice((1, 2, *NASTY))}
    sent = encoded(body) if body else b""
    return Shot(f"admin {path.partition('?')[0][:40]}", request(method, path, sent, *headers))
