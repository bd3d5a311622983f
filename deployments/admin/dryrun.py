"""A dry run: what a policy would have decided about the rounds that cells recorded."""

import copy
from collections import Counter
from collections.abc import Mapping
from typing import Any

from specserve.policies.document import Policy
from specserve.policies.replay import Recording, Replayed, num_changed, replay


def dry_run(recordings: Mapping[str, Recording], candidate: Policy, active: Policy) -> dict[str, Any]:
    """Return how both policies decide over the same rounds, from what each cell had learned. Cost: two replays."""
    ours, theirs, recorded, changed, rounds = [], [], Counter[int](), 0, 0
    for recording in recordings.values():
        new = replay(recording.rounds, candidate, copy.deepcopy(recording.state))
        old = replay(recording.rounds, active, copy.deepcopy(recording.state))
        changed += num_changed(new, old)
        rounds += len(recording.rounds)
        recorded.update(choice.gamma for round_ in recording.rounds for choice in round_.choices)
        ours.append(new)
        theirs.append(old)
    return {
        "cells": len(recordings),
        "rounds": rounds,
        "decisions": sum(one.num_steps for one in ours),
        "changed": changed,
        "candidate": _summary(ours),
        "active": _summary(theirs),
        "recorded": {"gammas": _histogram(recorded)},
    }


def _summary(replays: list[Replayed]) -> dict[str, Any]:
    whole = Replayed()
    for one in replays:
        whole.choices += one.choices
        whole.num_steps += one.num_steps
        whole.expected_tokens += one.expected_tokens
        whole.expected_ms += one.expected_ms
    return {
        "gammas": _histogram(whole.gammas),
        "reasons": dict(whole.reasons.most_common()),
        "tokens_per_step": round(whole.tokens_per_step, 4),
        "tokens_per_s": round(whole.tokens_per_s, 2),
    }


def _histogram(gammas: Counter[int]) -> dict[str, int]:
    return {str(gamma): gammas[gamma] for gamma in sorted(gammas)}
