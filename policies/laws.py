"""The laws that choose draft lengths: the schedule, the even trim to a cap, and the best prefix budget."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .document import TierPolicy
from .scoring import Steps
from .strengths import Curve, Standing

FAINT = 0.02
"""A slot whose token arrives and is accepted less often than this is not worth weighing."""

GroupKey = tuple[str, str, int, Standing, int]
Slot = tuple[float, GroupKey, int, int]
"""Minus the worth, for the order; the group's key; which slot of its requests; the group's number."""
Reach = tuple[str, int] | None
"""A proposer and how long its drafts may be."""


@dataclass(slots=True)
class Group:
    """Requests the adaptive law cannot tell apart: up to `cap` tokens each by `proposer`, with the chances of `curve`.

    `members` are their places in the batch; `entry_ms` is what the first slot of each costs extra.
    """

    key: GroupKey
    tier: str
    proposer: str
    weight: float
    cap: int
    curve: Curve
    entry_ms: float = 0.0
    members: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Scale:
    """The round without adaptive drafts: the weighted tokens it emits and what it costs.

    `steps` times `factor` is the score cost by draft tokens, of which `tokens` are there already; `draft_ms` holds the
    milliseconds per call, step and token by proposer, `started` the (longest draft, tokens) already asked of it.
    `slo_ms` and `tier_sizes` serve the TPOT objectives.
    """

    value: float
    tokens: float
    steps: Steps
    factor: float
    draft_ms: Mapping[str, tuple[float, float, float]]
    started: Mapping[str, tuple[int, int]]
    slo_ms: Mapping[str, float]
    tier_sizes: Mapping[str, int]


@dataclass(slots=True)
class Weighed:
    """The best allocation: a length for each group, one more for the first `extra` members of group `extra_group`.

    Rates are weighted tokens per millisecond: without adaptive drafts, and with the best drafts there are, even when
    none would be better. Lengths belong to the latter.
    """

    lengths: list[int]
    extra_group: int
    extra: int
    rate_plain: float
    rate_drafting: float
    reach: Reach = None


def fired_rule(tier: TierPolicy, qps: float, batch: int, acceptance: float) -> int | None:
    """Return the place of the first rule whose bounds all hold; None when `otherwise` applies."""
    for place, rule in enumerate(tier.rules):
        if rule.qps.holds(qps) and rule.batch.holds(batch) and rule.acceptance.holds(acceptance):
            return place
    return None


def scheduled_gamma(tier: TierPolicy, qps: float, batch: int, acceptance: float) -> int:
    """Return the gamma of the rule that fires, else `otherwise`."""
    place = fired_rule(tier, qps, batch, acceptance)
    return tier.otherwise if place is None else tier.rules[place].gamma


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


def weigh(groups: Sequence[Group], scale: Scale, limit: int, reaches: Sequence[Reach] = (None,)) -> Weighed:
    """Return the allocation of at most `limit` slots with the greatest rate, over the whole cost staircase.

    Slots of all requests compete: slot k of a request is worth its weight times the chance that the tokens up to k
    are accepted once drafted. That does not grow with k, so the first B slots are a prefix of every request. Within a
    group's k-th slots, tokens and milliseconds grow linearly between two steps of the cost, so the rate is greatest at
    an end or at a step: only those are weighed. A reach bounds one proposer's drafts, because the order of the slots
    does not know that its steps cost the same for one request as for many; the best of `reaches` wins, an earlier one
    if equal.
    Cost: O(n log n) for n = groups x longest cap. Source: DSpark, arXiv 2607.05147, with expected tokens, not asked.
    """
    slots: list[Slot] = []
    for number, group in enumerate(groups):
        accepted, weight = group.curve.accepted, -group.weight
        for k, worth in enumerate(group.curve.worth[: group.cap]):
            if accepted[k] < FAINT:
                break
            slots.append((weight * worth, group.key, k, number))
    slots.sort()
    best: Weighed | None = None
    for reach in reaches:
        weighed = _weigh_slots(groups, scale, slots if reach is None else _within(slots, groups, *reach), limit)
        if best is None or weighed.rate_drafting > best.rate_drafting:
            best = weighed
            best.reach = reach
    assert best is not None
    return best


def _within(slots: Sequence[Slot], groups: Sequence[Group], proposer: str, longest: int) -> list[Slot]:
    return [slot for slot in slots if slot[2] < longest or groups[slot[3]].proposer != proposer]


def _weigh_slots(groups: Sequence[Group], scale: Scale, slots: Sequence[Slot], limit: int) -> Weighed:
    path = _lay_out(groups, scale, slots, limit)
    place, part, rate = _best(path, scale)
    lengths = [0] * len(groups)
    for _, _, _, number in slots[: max(place - 1, 0)]:
        lengths[number] += 1
    number = slots[place - 1][3] if place else 0
    if place and part == len(groups[number].members):
        lengths[number] += 1
        part = 0
    plain_ms = path.plain_ms
    return Weighed(lengths, number, part, scale.value / plain_ms if plain_ms > 0.0 else 0.0, rate)


@dataclass(slots=True)
class _Path:
    """What the round is after the first i slots, at index i: tokens drafted, weighted value emitted, proposers' ms.

    `sizes[i]` is how many requests took the i-th slot; `gains` holds what each tier with an objective gained.
    """

    plain_ms: float
    tokens: list[float]
    value: list[float]
    draft_ms: list[float]
    sizes: list[int] = field(default_factory=lambda: [0])
    gains: dict[str, list[float]] = field(default_factory=dict)


def _lay_out(groups: Sequence[Group], scale: Scale, slots: Sequence[Slot], limit: int) -> _Path:
    longest = {name: started[0] for name, started in scale.started.items()}
    spent = 0.0
    for name, (gamma, asked) in scale.started.items():
        fixed, by_step, by_token = scale.draft_ms[name]
        spent += fixed + by_step * gamma + by_token * asked
    tokens, value = scale.tokens, scale.value
    path = _Path(scale.steps.at(tokens) * scale.factor + spent, [tokens], [value], [spent])
    all_tokens, all_value, all_ms, sizes = path.tokens, path.value, path.draft_ms, path.sizes
    known = [
        (group.proposer, len(group.members), group.weight, group.curve, group.entry_ms, *scale.draft_ms[group.proposer])
        for group in groups
    ]
    for _, _, k, number in slots:
        proposer, size, weight, curve, entry_ms, fixed, by_step, by_token = known[number]
        if size > limit:
            size = limit
            if size == 0:
                break
        limit -= size
        reached = longest.get(proposer, 0)
        if k >= reached:
            spent += by_step * (k + 1 - reached) + (0.0 if reached else fixed)
            longest[proposer] = k + 1
        spent += size * (by_token if k else by_token + entry_ms)
        tokens += size * curve.drafted[k]
        value += size * weight * curve.accepted[k]
        all_tokens.append(tokens)
        all_value.append(value)
        all_ms.append(spent)
        sizes.append(size)
    for tier in scale.slo_ms:
        path.gains[tier] = _gains(tier, groups, slots, sizes)
    return path


def _gains(tier: str, groups: Sequence[Group], slots: Sequence[Slot], sizes: Sequence[int]) -> list[float]:
    """Return the tokens that requests of the tier gain by the first i slots, at index i."""
    gains = [0.0]
    for (_, _, k, number), size in zip(slots, sizes[1:], strict=False):
        group = groups[number]
        gains.append(gains[-1] + (size * group.curve.accepted[k] if group.tier == tier else 0.0))
    return gains


def _best(path: _Path, scale: Scale) -> tuple[int, int, float]:
    """Return the place with the greatest rate, how many requests take its slot, and the rate; 0 without slots."""
    knots, values, slopes, factor = scale.steps.knots, scale.steps.values, scale.steps.slopes, scale.factor
    best, found, part = 0.0, 0, 0
    before, worth = path.tokens[0], path.value[0]
    j = 0
    while knots[j + 1] <= before:
        j += 1
    bound = bool(scale.slo_ms)
    rounds = zip(path.tokens[1:], path.value[1:], path.draft_ms[1:], path.sizes[1:], strict=True)
    for place, (end, value, spent, size) in enumerate(rounds, 1):
        while knots[j + 1] < end:
            fits = int((knots[j + 1] - before) / (end - before) * size) if size > 1 else 0
            if fits and slopes[j + 1] > slopes[j]:
                share = fits / size
                round_ms = (values[j] + slopes[j] * (before + share * (end - before) - knots[j])) * factor + spent
                rate = (worth + share * (value - worth)) / round_ms
                if rate > best and not (bound and _late(path, scale, place - 1, round_ms)):
                    best, found, part = rate, place, fits
            j += 1
        round_ms = (values[j] + slopes[j] * (end - knots[j])) * factor + spent
        if value > best * round_ms and not (bound and _late(path, scale, place, round_ms)):
            best, found, part = value / round_ms, place, size
        before, worth = end, value
    return found, part, best


def _late(path: _Path, scale: Scale, place: int, round_ms: float) -> bool:
    """Return whether a tier's TPOT objective is broken that plain decoding would keep."""
    for tier, slo_ms in scale.slo_ms.items():
        size = scale.tier_sizes[tier]
        if round_ms * size > max(slo_ms, path.plain_ms) * (size + path.gains[tier][place]):
            return True
    return False
