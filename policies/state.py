"""What planning reads and remembers: the observation of a round, the plan, and the state between rounds."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from .acceptance import Acceptance, Ease, History
from .arrivals import Arrivals, Crowd
from .costs import CostTable
from .document import Policy, TierPolicy
from .laws import Reach
from .strengths import PREDICTION, Standing
from .switching import Switch


class RequestSeen(Protocol):
    """One running request. `mode` is `on`, `off` or `auto`; `proposer` the one it insists on, if any.

    Only a request that `has_prediction` may use the proposer of that name.
    """

    @property
    def request_id(self) -> str: ...
    @property
    def tier(self) -> str: ...
    @property
    def mode(self) -> str: ...
    @property
    def max_draft_tokens(self) -> int | None: ...
    @property
    def proposer(self) -> str | None: ...
    @property
    def context_tokens(self) -> int: ...
    @property
    def remaining_tokens(self) -> int: ...
    @property
    def has_prediction(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class RequestObservation:
    """A running request as plain data; see `RequestSeen`."""

    request_id: str
    tier: str = "default"
    mode: str = "auto"
    max_draft_tokens: int | None = None
    proposer: str | None = None
    context_tokens: int = 0
    remaining_tokens: int = 1_000_000
    has_prediction: bool = False


@dataclass(frozen=True, slots=True)
class Observation:
    """What is running, which proposers answer, and the time.

    `num_beside` requests are in the same round under another policy: they cost, and are not planned for.
    """

    requests: Sequence[RequestSeen]
    available: frozenset[str]
    now_s: float = 0.0
    num_beside: int = 0


class Choice(NamedTuple):
    """One request's part in the plan: gamma 0 goes with no proposer."""

    proposer: str | None
    gamma: int
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """One choice per request, in the order observed, and the numbers the adaptive law weighed (tokens per ms)."""

    choices: tuple[Choice, ...]
    rate_plain: float = 0.0
    rate_chosen: float = 0.0


class DraftSeen(Protocol):
    """What became of one draft."""

    @property
    def request_id(self) -> str: ...
    @property
    def tier(self) -> str: ...
    @property
    def proposer(self) -> str: ...
    @property
    def num_asked(self) -> int: ...
    @property
    def num_drafted(self) -> int: ...
    @property
    def num_accepted(self) -> int: ...


@dataclass(frozen=True, slots=True)
class DraftResult:
    """A draft's outcome as plain data; see `DraftSeen`."""

    request_id: str
    tier: str
    proposer: str
    num_asked: int
    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What one round cost: `propose_ms` holds (proposer, largest gamma, milliseconds).

    `num_requests` and `num_tokens` are all of the forward's; `num_prefill_tokens` of them are prompt tokens. A round
    with prompt tokens says nothing about rounds without.
    """

    drafts: Sequence[DraftSeen]
    num_requests: int
    num_tokens: int
    score_ms: float
    propose_ms: tuple[tuple[str, int, float], ...] = ()
    num_prefill_tokens: int = 0


@dataclass(slots=True)
class Memory:
    """What is remembered of one running request: how easy its text is, and the proposer it drafts with.

    The proposer is reviewed again in `review_round`, which comes `patience` rounds after the last review, or when the
    ease has moved far from `chosen_ease`. Another one has to promise `margin` times as much, more with every change.
    """

    ease: Ease = field(default_factory=Ease)
    histories: dict[str, History] = field(default_factory=dict)
    proposer: str | None = None
    history: History | None = None
    chosen_ease: float = 0.0
    review_round: int = 0
    patience: int = 0
    margin: float = 1.05
    seen_round: int = 0
    probed_round: int = -1

    def standing(self, proposer: str) -> Standing:
        """Return how easy the text is for the proposer."""
        return self.ease.standing(self.histories.get(proposer))


@dataclass(frozen=True, slots=True)
class Asked:
    """What requests of one kind ask for under the policy in force.

    `settled` is the choice when nothing else matters. An `adaptive` length is left to the law, up to `cap`; otherwise
    it is `gamma`, or what the rules say where that is None. `names` are the proposers they may use.
    """

    tier: TierPolicy
    settled: Choice | None = None
    adaptive: bool = False
    gamma: int | None = None
    cap: int = 0
    reason: str = ""
    names: tuple[str, ...] = ()


AskKey = tuple[str, str, int | None, str | None, bool]
_MOST_KINDS = 1024


@dataclass(slots=True)
class Asking:
    """The kinds of requests met under one policy and one set of available proposers.

    `pairs` are the tiers that draft adaptively with the proposers that may serve them, in order.
    """

    policy: Policy
    available: frozenset[str]
    known: dict[AskKey, Asked] = field(default_factory=dict)
    pairs: list[tuple[str, str]] = field(default_factory=list)

    def of(self, key: AskKey) -> Asked:
        """Return what requests of this (tier, mode, max_draft_tokens, proposer, has_prediction) ask for."""
        asked = self.known.get(key)
        if asked is None:
            if len(self.known) >= _MOST_KINDS:
                self.known.clear()
            asked = self.known[key] = self._work_out(*key)
            if asked.adaptive:
                self.pairs = sorted({*self.pairs, *((key[0], name) for name in asked.names)})
        return asked

    def _work_out(
        self, tier_name: str, mode: str, max_draft_tokens: int | None, proposer: str | None, has_prediction: bool
    ) -> Asked:
        tier = self.policy.tier(tier_name)
        if mode == "off":
            return Asked(tier, Choice(None, 0, "mode_off"))
        law = "on" if mode == "on" else tier.law
        if law == "off":
            return Asked(tier, Choice(None, 0, "policy_off"))
        wanted = self.policy.proposers if proposer is None else (proposer,)
        usable = self.available if has_prediction else self.available - {PREDICTION}
        names = tuple(name for name in wanted if name in usable)
        cap = tier.max_gamma if max_draft_tokens is None else min(tier.max_gamma, max(max_draft_tokens, 0))
        if law == "on":
            return Asked(tier, None, False, cap, cap, "mode_on", names)
        if law == "fixed":
            return Asked(tier, None, False, tier.gamma, cap, "fixed", names)
        return Asked(tier, None, law == "adaptive", None, cap, law, names)


@dataclass(slots=True)
class Trial:
    """How often a proposer was tried by requests of a tier that draft with another, and when it may be again."""

    count: int = 0
    next_round: int = 0
    late_round: int = 0


@dataclass(slots=True)
class PlanState:
    """Everything between rounds, updated in place.

    `active_rounds` leaves out most rounds in which speculation is off: then the ease of a text hardly fades, so that it
    is mostly probes that bring it back. `behind` is the context each proposer has to catch up on this round.
    """

    costs: CostTable = field(default_factory=CostTable)
    acceptance: Acceptance = field(default_factory=Acceptance)
    arrivals: Arrivals = field(default_factory=Arrivals)
    crowd: Crowd = field(default_factory=Crowd)
    memories: dict[str, Memory] = field(default_factory=dict)
    switch: Switch = field(default_factory=Switch)
    asking: Asking | None = None
    round_number: int = 0
    active_rounds: int = 0
    behind: dict[str, int] = field(default_factory=dict)
    trials: dict[tuple[str, str], Trial] = field(default_factory=dict)
    reach: Reach = None
    next_reach: int = 0
    rallied_round: int = -1_000_000
    plain_attempts: int = 0
    plain_round: int = 0
