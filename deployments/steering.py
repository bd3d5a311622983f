"""`specserve policy`: operators steer a running service through its admin port."""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from specserve.service.errors import SpecserveError

from .steeringtext import (
    active_text,
    dry_run_text,
    explained_text,
    history_text,
    rollout_text,
    stored_text,
    validated_text,
    version_text,
)

Parser = argparse.ArgumentParser
Answer = dict[str, Any]
URL_VARIABLE, KEY_VARIABLE = "SPECSERVE_ADMIN_URL", "SPECSERVE_ADMIN_KEY"
DEFAULT_URL = "http://127.0.0.1:8001"
REFUSED, CONFLICT, UNAVAILABLE, FORBIDDEN = 2, 3, 4, 5
_CODES = {401: FORBIDDEN, 403: FORBIDDEN, 412: CONFLICT, 500: UNAVAILABLE, 503: UNAVAILABLE}
_TIMEOUT_S = 30.0
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
ENDS = f"""\
The key is taken from {KEY_VARIABLE}. Exit codes: 0 done, 2 refused as sent, 3 another change came first,
4 the service or its policy store does not answer, 5 the key may not do this.
"""


class SteeringError(SpecserveError):
    """The admin port refused; `exit_code` says what kind of refusal it was."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message, exit_code)
        self.exit_code = exit_code


def add_commands(parser: Parser) -> None:
    """Add the sub-commands and their arguments."""
    parser.description, parser.formatter_class = ENDS, argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="policy_command", required=True, metavar="COMMAND")

    def add(name: str, summary: str, example: str, run: Callable[[argparse.Namespace], int]) -> Parser:
        made = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=f"Example: specserve policy {example}",
        )
        url = os.environ.get(URL_VARIABLE, DEFAULT_URL)
        made.add_argument("--admin-url", default=url, metavar="URL", help=f"or {URL_VARIABLE} (default: %(default)s)")
        made.add_argument("--json", action="store_true", help="print the service's own answer")
        made.set_defaults(act=run)
        return made

    def reasoned(made: Parser) -> None:
        made.add_argument("--reason", required=True, help="why; kept in the audit")

    policy_help = "a YAML or JSON file, - for standard input, or off, fixed:N, adaptive"
    show = add("show", "show the active policy, or another version", "show 3", _show)
    show.add_argument("version", nargs="?", help="a number or `previous` (default: the active one)")
    validate = add("validate", "check a policy and show what it would change", "validate night.yaml", _validate)
    validate.add_argument("policy", metavar="POLICY", help=policy_help)
    dry = add("dry-run", "try a policy on the last recorded rounds", "dry-run night.yaml --rounds 1000", _dry_run)
    dry.add_argument("policy", metavar="POLICY", help=f"{policy_help}, or the number of a version")
    dry.add_argument("--rounds", type=int, default=500, help="of each cell (default: %(default)s)")
    apply = add("apply", "store a policy and make it active", "apply night.yaml --reason 'quiet night'", _apply)
    apply.add_argument("policy", metavar="POLICY", help=policy_help)
    apply.add_argument("--if-version", type=int, metavar="N", help="only if this version is active")
    apply.add_argument("--stage", action="store_true", help="store it only; `activate` comes later")
    reasoned(apply)
    activate = add("activate", "let a stored version take over", "activate 3 --canary 10 --reason trial", _activate)
    _add_activation(activate)
    reasoned(activate)
    rollback = add(
        "rollback", "end the canary, or go back to the version before", "rollback --reason slower", _rollback
    )
    reasoned(rollback)
    off = add("off", "turn speculation off at once", "off --tier flex --ttl 15m --reason incident", _off)
    off.add_argument("--tier", help="only there (default: everywhere)")
    off.add_argument("--ttl", type=_seconds, metavar="TIME", help="such as 90s, 15m, 2h (default: until --end)")
    off.add_argument("--end", action="store_true", help="end all overrides instead")
    reasoned(off)
    history = add("history", "list who changed what, when and why", "history --limit 5", _history)
    history.add_argument("--limit", type=int, default=20, help="newest entries (default: %(default)s)")
    explain = add("explain", "say why a request was speculated or not", "explain cmpl-1f0c", _explain)
    explain.add_argument("request_id", metavar="REQUEST_ID", help="the `id` of an answer")


def _add_activation(parser: Parser) -> None:
    parser.add_argument("version", help="a number or `previous`")
    parser.add_argument("--canary", type=float, metavar="PERCENT", help="only for this share of the requests")
    parser.add_argument("--tiers", metavar="A,B", help="the canary's tiers (default: all)")
    parser.add_argument("--shadow", action="store_true", help="evaluate it beside the active one; it never acts")
    parser.add_argument("--max-tpot-p95-ms", type=float, metavar="MS", help="the canary ends above it")
    parser.add_argument("--max-tpot-ratio", type=float, metavar="X", help="and above X times the active one's")
    parser.add_argument("--max-error-rate", type=float, metavar="SHARE", help="and above this share of failed requests")
    parser.add_argument("--min-acceptance", type=float, metavar="SHARE", help="and below this acceptance rate")
    parser.add_argument("--min-requests", type=int, metavar="N", help="not before so many requests ended")


def run(args: argparse.Namespace) -> int:
    """Run one sub-command and return its exit code."""
    try:
        code: int = args.act(args)
    except SteeringError as error:
        print(f"specserve policy {args.policy_command}: {error.message}", file=sys.stderr)
        return error.exit_code
    return code


def _show(args: argparse.Namespace) -> int:
    if args.version is not None:
        return _print(args, _ask(args, "GET", f"policies/{quote(args.version, safe='')}"), version_text)
    return _print(args, _ask(args, "GET", "policies") | {"state": _ask(args, "GET", "state")}, active_text)


def _validate(args: argparse.Namespace) -> int:
    answer = _ask(args, "POST", "policies:validate", {"policy": _policy(args.policy)})
    return _print(args, answer, validated_text)


def _dry_run(args: argparse.Namespace) -> int:
    what: Answer = {"version": int(args.policy)} if args.policy.isdigit() else {"policy": _policy(args.policy)}
    return _print(args, _ask(args, "POST", "policies:dry-run", {**what, "rounds": args.rounds}), dry_run_text)


def _apply(args: argparse.Namespace) -> int:
    body = {"policy": _policy(args.policy), "reason": args.reason, "activate": not args.stage}
    headers = {} if args.if_version is None else {"If-Match": f'"{args.if_version}"'}
    answer = _ask(args, "PUT", "policies", body, headers)
    return _print(args, answer, stored_text)


def _activate(args: argparse.Namespace) -> int:
    body: Answer = {"reason": args.reason, "shadow": args.shadow}
    if args.canary is not None:
        guard = {
            "tpot_p95_ms": args.max_tpot_p95_ms,
            "tpot_p95_ratio": args.max_tpot_ratio,
            "error_rate": args.max_error_rate,
            "acceptance_floor": args.min_acceptance,
            "min_requests": args.min_requests,
        }
        stated = {name: bound for name, bound in guard.items() if bound is not None}
        tiers = [tier.strip() for tier in (args.tiers or "").split(",") if tier.strip()]
        body["canary"] = {"percent": args.canary, "tiers": tiers, "guard": stated}
    return _print(args, _ask(args, "POST", f"policies/{quote(args.version, safe='')}:activate", body), rollout_text)


def _rollback(args: argparse.Namespace) -> int:
    return _print(args, _ask(args, "POST", "policies:rollback", {"reason": args.reason}), rollout_text)


def _off(args: argparse.Namespace) -> int:
    if args.end:
        answer = _ask(args, "DELETE", "overrides", {"reason": args.reason})
        return _print(args, answer, lambda found: f"{found['ended']} overrides ended")
    body: Answer = {"speculation": "off", "reason": args.reason, "tier": args.tier, "ttl_s": args.ttl}
    where = "everywhere" if args.tier is None else f"in the tier {args.tier}"
    until = "until it is ended" if args.ttl is None else f"for {args.ttl:g} s"
    return _print(args, _ask(args, "POST", "overrides", body), lambda _: f"speculation is off {where} {until}")


def _history(args: argparse.Namespace) -> int:
    return _print(args, _ask(args, "GET", f"audit?limit={args.limit}"), history_text)


def _explain(args: argparse.Namespace) -> int:
    return _print(args, _ask(args, "GET", f"decisions/{quote(args.request_id, safe='')}"), explained_text)


def _print(args: argparse.Namespace, answer: Answer, render: Callable[[Answer], str]) -> int:
    print(json.dumps(answer, indent=2) if args.json else render(answer))
    return 0


def _ask(
    args: argparse.Namespace, method: str, path: str, body: Answer | None = None, headers: dict[str, str] | None = None
) -> Answer:
    """Return the admin API's answer. Raises SteeringError with what it said."""
    import httpx

    key = os.environ.get(KEY_VARIABLE)
    sent = {**(headers or {}), **({"Authorization": f"Bearer {key}"} if key else {})}
    url = f"{args.admin_url.rstrip('/')}/admin/v1/{path}"
    try:
        answer = httpx.request(method, url, json=body, headers=sent, timeout=_TIMEOUT_S)
        found = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise SteeringError(f"{args.admin_url} does not answer: {error}", UNAVAILABLE) from error
    if answer.status_code >= 400:
        said = found.get("error", {}).get("message", answer.text) if isinstance(found, dict) else answer.text
        raise SteeringError(said, _CODES.get(answer.status_code, REFUSED))
    return dict(found)


def _policy(named: str) -> object:
    """Return the policy to send: a name as it stands, a file's content as plain data."""
    if named in ("off", "adaptive") or named.startswith("fixed:"):
        return named
    import yaml

    try:
        return yaml.safe_load(sys.stdin.read() if named == "-" else Path(named).read_text("utf-8"))
    except OSError as error:
        raise SteeringError(f"cannot read {named}: {error.strerror}", REFUSED) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SteeringError(f"{named} is neither YAML nor JSON", REFUSED) from error


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if found is None or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text} is no time such as 90s, 15m or 2h")
    return float(found[1]) * _UNITS_S[found[2] or "s"]
