"""The plug points of the engine: what it needs from a target, verifier, proposers and planner, wherever they live."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from .messages import DraftBatch, ProposeBatch, ScoreBatch, VerdictBatch, VerifyBatch


class Proposer(Protocol):
    """Guesses tokens. May be slow, wrong or dead: a draft is a hint, never a promise."""

    @property
    def name(self) -> str:
        """The name operators use, such as `draft` or `prompt_lookup`."""
        ...

    def propose(self, batch: ProposeBatch) -> DraftBatch:
        """Return drafts of at most `row.gamma` tokens; frees the state of `batch.closed` first."""
        ...


@dataclass(frozen=True, slots=True)
class CommittedOutput:
    """What a request wrote before it was over. Only requests of one `scope` may profit from each other's."""

    scope: str
    token_ids: tuple[int, ...]


@runtime_checkable
class Learner(Protocol):
    """A proposer, or the port to one, that learns from every request of its cell, whoever drafted for it."""

    def observe(self, output: CommittedOutput) -> None:
        """Take in what a request wrote. A port raises `ProposerUnavailableError` when that failed."""
        ...


class RoundPort(Protocol):
    """Runs the score and verify steps of a round. Raises `RoundLostError` when a process died under it."""

    async def run_round(self, score: ScoreBatch, verify: VerifyBatch) -> VerdictBatch:
        """Return the verdicts; safe to call again with the same arguments after `RoundLostError`."""
        ...

    async def recover(self) -> bool:
        """Wait until target and verifier answer again; True when the target's KV was lost."""
        ...


class ProposerPort(Protocol):
    """Reaches one proposer. Raises `ProposerUnavailableError` on a miss; the engine then goes on without it."""

    @property
    def name(self) -> str:
        """The proposer's name."""
        ...

    @property
    def generation(self) -> int:
        """Changes whenever the proposer behind the port may have forgotten its requests."""
        ...

    @property
    def available(self) -> bool:
        """False while disconnected; the port reconnects by itself."""
        ...

    @property
    def needs_pages(self) -> bool:
        """True when the proposer lives beside the target and reads the request's pages there."""
        ...

    async def propose(self, batch: ProposeBatch, timeout_s: float) -> DraftBatch:
        """Return the drafts or raise `ProposerUnavailableError` after `timeout_s` seconds."""
        ...


@dataclass(frozen=True, slots=True)
class Decision:
    """What one running request does this round. `reason` is a short constant such as `adaptive` or `mode_off`.

    `law` is that of its tier under the policy in force.
    """

    proposer: str | None
    gamma: int
    reason: str
    law: str = "none"


@dataclass(frozen=True, slots=True)
class RequestView:
    """What the planner may know about one running request: numbers and names, never text."""

    request_id: str
    tier: str
    mode: str
    max_draft_tokens: int | None
    proposer: str | None
    context_tokens: int
    remaining_tokens: int
    has_prediction: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one decision: how many tokens were asked for, and how many one after the other were drafted and
    accepted: of a tree, its depth and that of the accepted path."""

    request_id: str
    tier: str
    proposer: str
    num_asked: int
    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class RoundCost:
    """Measured milliseconds of one round: `propose_ms` per proposer called, `score_ms` for target and verifier.

    `num_tokens` counts all tokens of the forward, `num_prefill_tokens` those of prompts among them.
    """

    num_requests: int
    num_tokens: int
    score_ms: float
    propose_ms: tuple[tuple[str, int, float], ...]
    num_prefill_tokens: int = 0


class Planner(Protocol):
    """Chooses gamma and proposer for every running request, once per round."""

    def plan(self, requests: Sequence[RequestView], available: frozenset[str], now_s: float) -> tuple[Decision, ...]:
        """Return one decision per request, in order."""
        ...

    def learn(self, outcomes: Sequence[Outcome], cost: RoundCost) -> None:
        """Take in what the last round did."""
        ...

    def arrived(self, now_s: float) -> None:
        """Note that a request arrived, for the arrival rate."""
        ...

    def ended(self, request_id: str, failed: bool, tpot_ms: float | None) -> None:
        """Note that a request ended; `tpot_ms` is what each output token after the first took, if there were any."""
        ...

    @property
    def policy_version(self) -> int:
        """The version of the active policy."""
        ...

    def tpot_slo_ms(self, tier: str) -> float | None:
        """Return what an output token of the tier may take; None when its policy does not say."""
        ...

    def version_of(self, request_id: str) -> int:
        """Return the version of the policy that decided for the request last."""
        ...
