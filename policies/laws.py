"""The laws that choose draft lengths: the schedule, the even trim to a cap, and the best prefix budget."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .acceptance import Chances
from .document import TierPolicy


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request the adaptive law may let draft up to `cap` tokens with `proposer`."""

    index: int
    request_id: str
    tier: str
    weight: float
    proposer: str
    cap: int
    chances: Chances


@dataclass(frozen=True, slots=True)
class Scale:
    """The round without adaptive drafts: its emitted tokens, their weighted sum and what it costs.

    `score_ms[b]` is the score cost with b more tokens; `draft_ms[proposer][g]` the cost of drafts up to g tokens.
    `slo_ms` and `tier_sizes` serve the TPOT objectives.
    """

    value: float
    score_ms: Sequence[float]
    fixed_ms: float
    draft_ms: Mapping[str, Sequence[float]]
    started: Mapping[str, int]
    slo_ms: Mapping[str, float]
    tier_sizes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Budget:
    """`order` lists the candidates' slots by worth; `rates[b]` is weighted tokens per ms with the first b of them.

    A budget that breaks a TPOT objective has the rate 0.
    """

    order: tuple[int, ...]
    rates: tuple[float, ...]

    @property
    def best(self) -> int:
        """The smallest budget with the greatest rate."""
        return max(range(len(self.rates)), key=lambda b: (self.rates[b], -b))


def scheduled_gamma(tier: TierPolicy, qps: float, batch: int, acceptance: float) -> int:
    """Return the gamma of the first rule whose bounds all hold, else `otherwise`."""
    for rule in tier.rules:
        if rule.qps.holds(qps) and rule.batch.holds(batch) and rule.acceptance.holds(acceptance):
            return rule.gamma
    return tier.otherwise


def trim_evenly(asked: Sequence[tuple[float, str, int]], limit: int) -> list[int]:
    """Return lengths that add up to at most `limit`, cutting the longest first.

    `asked` holds (weight, request_id, gamma). When not even one token each fits, the heaviest requests come first.
    """
    if sum(gamma for _, _, gamma in asked) <= limit:
        return [gamma for _, _, gamma in asked]
    level = max((gamma for _, _, gamma in asked), default=0)
    while level > 0 and sum(min(gamma, level) for _, _, gamma in asked) > limit:
        level -= 1
    lengths = [min(gamma, level) for _, _, gamma in asked]
    spare = limit - sum(lengths)
    for i in sorted(range(len(asked)), key=lambda i: (-asked[i][0], asked[i][1])):
        if spare > 0 and asked[i][2] > level:
            lengths[i] += 1
            spare -= 1
    return lengths


def weigh_budgets(candidates: Sequence[Candidate], scale: Scale, limit: int) -> Budget:
    """Return every prefix budget's rate, for the global optimum over a cost staircase.

    Slots of all requests compete: slot k of a request is worth its weight times the chance that the tokens up to k
    are accepted once drafted. That does not grow with k, so the first B slots are a prefix of every request.
    Cost: O(n + limit log n) for n candidates. Source: DSpark, arXiv 2607.05147, with expected instead of asked tokens.
    """
    heads = []
    for number, candidate in enumerate(candidates):
        if candidate.cap > 0:
            drafted, right = candidate.chances.at(0)
            heads.append((-candidate.weight * right, candidate.request_id, 0, number, drafted, drafted * right))
    heapq.heapify(heads)
    order: list[int] = []
    value, tokens = scale.value, 0.0
    draft_ms = {p: curve[scale.started.get(p, 0)] for p, curve in scale.draft_ms.items()}
    total_draft_ms = scale.fixed_ms + sum(draft_ms.values())
    plain_ms = scale.score_ms[0] + total_draft_ms
    rates = [value / plain_ms]
    gains = {tier: 0.0 for tier in scale.slo_ms}
    last = len(scale.score_ms) - 1
    while heads and len(order) < limit:
        worth, request_id, k, number, drafted, accepted = heads[0]
        candidate = candidates[number]
        proposer, tier = candidate.proposer, candidate.tier
        if k + 1 < candidate.cap:
            more, right = candidate.chances.at(k + 1)
            head = (worth * right, request_id, k + 1, number, drafted * more, accepted * more * right)
            heapq.heapreplace(heads, head)
        else:
            heapq.heappop(heads)
        order.append(number)
        value += candidate.weight * accepted
        tokens += drafted
        spent = scale.draft_ms[proposer][k + 1]
        if spent > draft_ms[proposer]:
            total_draft_ms += spent - draft_ms[proposer]
            draft_ms[proposer] = spent
        whole = int(tokens)
        score = scale.score_ms[min(whole, last)]
        if whole < last:
            score += (scale.score_ms[whole + 1] - score) * (tokens - whole)
        round_ms = score + total_draft_ms
        rate = value / round_ms
        if gains:
            if tier in gains:
                gains[tier] += accepted
            for name, gain in gains.items():
                size = scale.tier_sizes[name]
                if round_ms * size > max(scale.slo_ms[name], plain_ms) * (size + gain):
                    rate = 0.0
        rates.append(rate)
    return Budget(tuple(order), tuple(rates))
