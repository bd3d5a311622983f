"""The admin API's answers as operators read them in a terminal."""

import json
import time
from typing import Any

import yaml

Answer = dict[str, Any]
_BAR = 40


def active_text(answer: Answer) -> str:
    """Return the active policy, and what else governs."""
    active, state = answer["active"], answer["state"]
    lines = [f"version {active['version']} is active on {_num_current(state)} cells", ""]
    if answer["canary"] is not None:
        lines.insert(1, _canary_line(answer["canary"]))
    if answer["shadow"] is not None:
        lines.insert(1, f"version {answer['shadow']} is a shadow")
    for override in state["overrides"]:
        where = "everywhere" if override["tier"] is None else f"in the tier {override['tier']}"
        until = "" if override["expires_s"] is None else f" until {_time(override['expires_s'])}"
        lines.insert(1, f"override: speculation off {where}{until} ({override['actor']}: {override['reason']})")
    if state["store"]["error"]:
        lines.insert(1, f"the store cannot be used: {state['store']['error']}")
    return "\n".join(lines) + "\n" + _document(active["policy"])


def version_text(answer: Answer) -> str:
    """Return one version and where it came from."""
    made = f"{_time(answer['created_s'])} by {answer['actor']}: {answer['reason']}"
    return f"version {answer['version']}{' (active)' if answer['active'] else ''}, {made}\n\n" + _document(
        answer["policy"]
    )


def validated_text(answer: Answer) -> str:
    """Return what a policy would change."""
    return f"valid; against version {answer['against']}:\n{_diff(answer['diff'])}"


def stored_text(answer: Answer) -> str:
    """Return what became of a new version."""
    return f"version {answer['version']} is {'active' if answer['active'] else 'stored'}"


def rollout_text(answer: Answer) -> str:
    """Return what governs after a change."""
    lines = [f"version {answer['version']} is active"]
    if answer["canary"] is not None:
        lines.append(_canary_line(answer["canary"]))
    if answer["shadow"] is not None:
        lines.append(f"version {answer['shadow']} is a shadow")
    return "\n".join(lines)


def dry_run_text(answer: Answer) -> str:
    """Return how decisions would change, with both histograms of draft lengths."""
    decisions = answer["decisions"]
    share = answer["changed"] / decisions if decisions else 0.0
    rounds = f"{answer['rounds']} rounds of {answer['cells']} cells"
    lines = [f"{answer['changed']} of {decisions} decisions change ({share:.1%}), over {rounds}"]
    for name in ("candidate", "active"):
        found = answer[name]
        lines.append(
            f"{name}: {found['tokens_per_step']:.2f} tokens a step, {found['tokens_per_s']:.1f} tokens/s expected"
        )
        most = max(found["gammas"].values(), default=1)
        for gamma, count in found["gammas"].items():
            lines.append(f"  gamma {gamma:>2} {count:>8} {'#' * round(_BAR * count / most)}")
    return "\n".join(lines)


def history_text(answer: Answer) -> str:
    """Return the audit, newest first, one line an entry and one a difference."""
    lines = []
    for entry in answer["entries"]:
        moved = f"{entry['old_version'] or '-'} -> {entry['new_version'] or '-'}"
        result = "" if entry["result"] == "done" else f" [{entry['result']}]"
        head = f"{_time(entry['at_s'])}  {entry['actor']}  {entry['action']}  {moved}  {entry['reason']}{result}"
        lines.append(head)
        if entry["old_version"] is not None and entry["diff"]:
            lines.append(_diff(entry["diff"]))
    return "\n".join(lines) or "nothing was changed yet"


def explained_text(answer: Answer) -> str:
    """Return why each choice of an answer was speculated or not."""
    return "\n\n".join(_choice(choice) for choice in answer["choices"])


def _choice(one: Answer) -> str:
    decision, inputs, policy = one["decision"], one["inputs"], one["policy"]
    rule = "" if one["rule"] is None else f", rule {one['rule']}"
    canary = ", the canary" if policy["canary"] else ""
    rates, summary = inputs["tokens_per_ms"], one["summary"]
    reasons = ", ".join(f"{reason} {count}" for reason, count in summary["reasons"].items())
    lines = [
        f"{one['request_id']}  tier {one['tier']}, mode {one['asked']['mode']}, on {one['cell']}",
        f"policy {policy['name']}, version {policy['version']}{canary}; law {one['law']}{rule}",
        f"gamma {decision['gamma']} by {decision['proposer'] or 'nobody'}: {one['why']} ({decision['reason']})",
        f"batch {inputs['batch']}, {inputs['qps']:.2f} requests/s, acceptance {inputs['acceptance_rate']:.2f},"
        f" context {inputs['context_tokens']}; tokens/ms {rates['plain']:.3f} plain, {rates['chosen']:.3f} chosen",
        f"{summary['rounds']} rounds, {summary['drafting_rounds']} with drafts, {summary['accepted']} of"
        f" {summary['drafted']} draft tokens accepted; by reason: {reasons}",
        "rounds  gamma  proposer        accepted  reason",
    ]
    for part in one["gamma_track"]:
        proposer, accepted = part["proposer"] or "-", f"{part['accepted']}/{part['drafted']}"
        lines.append(f"{part['rounds']:>6}  {part['gamma']:>5}  {proposer:<14}  {accepted:>8}  {part['reason']}")
    return "\n".join(lines)


def _num_current(state: Answer) -> str:
    live = [cell for cell in state["cells"].values() if cell["live"]]
    return f"{sum(cell['up_to_date'] for cell in live)} of {len(live)}"


def _canary_line(canary: Answer) -> str:
    tiers = f" of {', '.join(canary['tiers'])}" if canary["tiers"] else ""
    return f"version {canary['version']} is a canary for {canary['percent']:g}% of the requests{tiers}"


def _diff(diff: list[Answer]) -> str:
    signs = {"add": "+", "remove": "-", "replace": "~"}
    lines = [
        f"  {signs[step['op']]} {step['path']}" + (f": {json.dumps(step['value'])}" if "value" in step else "")
        for step in diff
    ]
    return "\n".join(lines) or "  no difference"


def _document(policy: Answer) -> str:
    return yaml.safe_dump(policy, sort_keys=False).rstrip()


def _time(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))
