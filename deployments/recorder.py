"""What a cell remembers of its rounds for dry runs, and how a shadow's decisions compare. Numbers and names only."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from specserve.policies.replay import RecordedRound
from specserve.policies.state import Choice, RoundResult

MAX_DECISIONS = 16_384


class Recorder:
    """The newest rounds, `MAX_DECISIONS` decisions in all."""

    def __init__(self) -> None:
        self._rounds: deque[RecordedRound] = deque()
        self._num_decisions = 0
        self._open: RecordedRound | None = None

    def plan(self, round_: RecordedRound) -> None:
        """Record a round that was planned."""
        self._open = round_
        self._rounds.append(round_)
        self._num_decisions += len(round_.requests)
        while self._num_decisions > MAX_DECISIONS and len(self._rounds) > 1:
            self._num_decisions -= len(self._rounds.popleft().requests)

    def learn(self, result: RoundResult) -> None:
        """Add what came of the round planned last."""
        if self._open is not None:
            self._open.result, self._open = result, None

    def newest(self, num_rounds: int) -> tuple[RecordedRound, ...]:
        """Return the last `num_rounds` rounds, oldest first."""
        return tuple(self._rounds)[-num_rounds:]


@dataclass(slots=True)
class ShadowTally:
    """How often a shadow would have decided otherwise, and how much each would have drafted."""

    version: int | None = None
    decisions: int = 0
    changed: int = 0
    draft_tokens: int = 0
    shadow_draft_tokens: int = 0
    gammas: Counter[int] = field(default_factory=Counter)

    def compare(self, acting: Sequence[Choice], shadow: Sequence[Choice]) -> None:
        """Count one round's decisions."""
        self.decisions += len(acting)
        for live, other in zip(acting, shadow, strict=True):
            self.changed += live[:2] != other[:2]
            self.draft_tokens += live.gamma
            self.shadow_draft_tokens += other.gamma
            self.gammas[other.gamma] += 1
