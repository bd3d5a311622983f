"""Replaying recorded rounds under another policy: what it would decide, and what it expects to get for it."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .arrivals import WINDOW_S, Arrivals
from .document import Policy
from .learning import learn_round
from .planning import plan_round
from .state import Choice, Memory, Observation, PlanState, RequestSeen, RoundResult


@dataclass(slots=True)
class RecordedRound:
    """One round as it was: numbers and names, never text. `result` is None when the round was lost."""

    requests: Sequence[RequestSeen]
    available: frozenset[str]
    now_s: float
    qps: float
    choices: Sequence[Choice]
    result: RoundResult | None = None


@dataclass(frozen=True, slots=True)
class Recording:
    """The rounds of one cell, oldest first, and what its policy had learned by the last of them."""

    rounds: tuple[RecordedRound, ...]
    state: PlanState


@dataclass(slots=True)
class Replayed:
    """What a policy decided over some rounds: choices by round, and the tokens and milliseconds it expects of them."""

    choices: list[tuple[Choice, ...]] = field(default_factory=list)
    num_steps: int = 0
    expected_tokens: float = 0.0
    expected_ms: float = 0.0

    @property
    def gammas(self) -> Counter[int]:
        """How many decisions chose each draft length."""
        return Counter(choice.gamma for choices in self.choices for choice in choices)

    @property
    def reasons(self) -> Counter[str]:
        """How many decisions had each reason."""
        return Counter(choice.reason for choices in self.choices for choice in choices)

    @property
    def tokens_per_step(self) -> float:
        """Expected tokens of a request in one round; 1 is plain decoding."""
        return self.expected_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Expected tokens of all requests in a second of rounds."""
        return 1e3 * self.expected_tokens / self.expected_ms if self.expected_ms > 0.0 else 0.0


def replay(rounds: Iterable[RecordedRound], policy: Policy, state: PlanState) -> Replayed:
    """Return what `policy` decides over recorded rounds, learning from what they showed; `state` is updated in place.

    Requests go on as they were recorded, however much the policy would have drafted for them.
    Cost: one plan and one learning step a round.
    """
    replayed = Replayed()
    for round_ in rounds:
        state.arrivals = Arrivals(round_.qps * WINDOW_S, round_.now_s)
        plan, state = plan_round(Observation(round_.requests, round_.available, round_.now_s), policy, state)
        replayed.choices.append(plan.choices)
        _expect(round_, plan.choices, state, replayed)
        if round_.result is not None:
            learn_round(round_.result, state)
    return replayed


def num_changed(one: Replayed, other: Replayed) -> int:
    """Return how many decisions about the same requests differ in proposer or length."""
    pairs = zip(one.choices, other.choices, strict=True)
    return sum(a[:2] != b[:2] for first, second in pairs for a, b in zip(first, second, strict=True))


def _expect(round_: RecordedRound, choices: Sequence[Choice], state: PlanState, replayed: Replayed) -> None:
    """Add what the round's drafts are expected to bring and to cost."""
    drafted = 0.0
    asked: dict[str, list[int]] = {}
    for request, choice in zip(round_.requests, choices, strict=True):
        replayed.num_steps += 1
        replayed.expected_tokens += 1.0
        if choice.proposer is None:
            continue
        memory = state.memories.get(request.request_id) or Memory()
        shared = state.acceptance.of(choice.proposer, request.tier)
        curve = shared.curve(memory.standing(choice.proposer), choice.gamma)
        replayed.expected_tokens += sum(curve.accepted[: choice.gamma])
        drafted += sum(curve.drafted[: choice.gamma])
        asked.setdefault(choice.proposer, []).append(choice.gamma)
    num = len(choices)
    replayed.expected_ms += state.costs.score_ms(num, num + drafted) if num else 0.0
    for proposer, gammas in asked.items():
        replayed.expected_ms += state.costs.draft(proposer).at(max(gammas), sum(gammas))
