"""What planning reads and remembers: the observation of a round, the plan, and the state between rounds."""

from dataclasses import dataclass, field

from .acceptance import Acceptance, Evidence
from .arrivals import Arrivals
from .costs import CostTable, unmeasured_costs


@dataclass(frozen=True, slots=True)
class RequestObservation:
    """One running request. `mode` is `on`, `off` or `auto`; `proposer` the one it insists on, if any."""

    request_id: str
    tier: str = "default"
    mode: str = "auto"
    max_draft_tokens: int | None = None
    proposer: str | None = None
    context_tokens: int = 0
    remaining_tokens: int = 1_000_000


@dataclass(frozen=True, slots=True)
class Observation:
    """What is running, which proposers answer, and the time."""

    requests: tuple[RequestObservation, ...]
    available: frozenset[str]
    now_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice:
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


@dataclass(frozen=True, slots=True)
class DraftResult:
    """What became of one draft."""

    request_id: str
    tier: str
    proposer: str
    num_asked: int
    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What one round cost: `propose_ms` holds (proposer, largest gamma, milliseconds)."""

    drafts: tuple[DraftResult, ...]
    num_requests: int
    num_tokens: int
    score_ms: float
    propose_ms: tuple[tuple[str, int, float], ...] = ()


@dataclass(slots=True)
class Memory:
    """What is remembered of one running request."""

    evidence: dict[str, Evidence] = field(default_factory=dict)
    proposer: str | None = None
    chosen_round: int = 0
    seen_round: int = 0
    probed_round: int = -1


@dataclass(slots=True)
class PlanState:
    """Everything between rounds, updated in place.

    `budget_share` is draft tokens per adaptive request last round. `active_rounds` leaves out the rounds in which
    speculation is off: then a request's own history does not fade, so that only probes bring it back.
    """

    costs: CostTable = field(default_factory=unmeasured_costs)
    acceptance: Acceptance = field(default_factory=Acceptance)
    arrivals: Arrivals = field(default_factory=Arrivals)
    memories: dict[str, Memory] = field(default_factory=dict)
    round_number: int = 0
    active_rounds: int = 0
    speculating: bool = True
    switched_round: int = -1_000_000
    budget_share: float = 0.0
    probe_interval: int = 0
    first_interval: int = 0
    next_probe_round: int = 0
    probes: int = 0
    probing: bool = False
    warmed: dict[int, int] = field(default_factory=dict)
    tried: dict[tuple[str, str], float] = field(default_factory=dict)
