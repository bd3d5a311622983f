"""Requests on an imagined machine: what a policy would earn, with every chance drawn from a seed.

In the closed loop, `simulate`, as many requests are always running; `replay` has them come when they come.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .arrivals import arrived
from .document import Policy
from .learning import learn_round
from .planning import plan_round
from .state import Choice, DraftResult, Observation, PlanState, RequestObservation, RoundResult
from .strengths import PREDICTION


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of text of about `mean_tokens`: by proposer, the chance that it finds a draft and that a token fits."""

    mean_tokens: int
    chances: Mapping[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that draw their stretches in turn from `stretches`, until `output_tokens` are written."""

    name: str
    stretches: tuple[Stretch, ...]
    prompt_tokens: int = 200
    output_tokens: int = 200


@dataclass(frozen=True, slots=True)
class Machine:
    """Milliseconds of a forward by (requests, tokens), and of a proposer's call by the gammas it was asked for.

    `catch_up_ms` is what a proposer takes for a token of context it has not seen, `prefill_ms` the target for one of a
    prompt, of which a round takes in `prompt_share`. Every measurement is multiplied by log-normal noise; one in a
    hundred takes twice as long.
    """

    score_ms: Callable[[int, int], float]
    draft_ms: Mapping[str, Callable[[Sequence[int]], float]]
    noise: float = 0.05
    catch_up_ms: Mapping[str, float] = field(default_factory=dict)
    prefill_ms: float = 0.1
    prompt_share: int = 1_000_000


@dataclass(frozen=True, slots=True)
class Round:
    """What one simulated round took and gave, when it began, and how many requests had no token yet."""

    ms: float
    num_tokens: int
    choices: tuple[Choice, ...]
    speculating: bool
    start_s: float
    num_waiting: int


@dataclass(frozen=True, slots=True)
class Served:
    """One request's times in seconds, and its tokens."""

    arrived_s: float
    first_token_s: float
    end_s: float
    num_tokens: int

    @property
    def tpot_ms(self) -> float:
        """Milliseconds for each token after the first."""
        return (self.end_s - self.first_token_s) * 1e3 / max(self.num_tokens - 1, 1)


@dataclass(slots=True)
class _Text:
    """One request's text: by proposer, at which positions a draft is found and which tokens it gets right.

    What fits is a property of the text, not of the policy, so policies that run on one seed meet the same luck.
    """

    request_id: str
    workload: Workload
    found: dict[str, list[bool]] = field(default_factory=dict)
    right: dict[str, list[bool]] = field(default_factory=dict)
    arrived_s: float = 0.0
    first_token_s: float = 0.0
    written: int = 0
    filled: int = 0
    drafted_at: dict[str, int] = field(default_factory=dict)

    def draft(self, proposer: str, gamma: int) -> tuple[int, int]:
        """Return how many tokens are drafted and accepted here."""
        if not self.found[proposer][self.written]:
            return 0, 0
        right, accepted = self.right[proposer], 0
        while accepted < gamma and right[self.written + accepted]:
            accepted += 1
        return gamma, accepted


def tokens_per_ms(rounds: Sequence[Round]) -> float:
    """Return the throughput of some rounds."""
    return sum(r.num_tokens for r in rounds) / sum(r.ms for r in rounds)


def simulate(
    policy: Policy,
    machine: Machine,
    workloads: Sequence[Workload],
    concurrency: int,
    output_tokens: int,
    seed: int,
    state: PlanState | None = None,
) -> list[Round]:
    """Return the rounds that write `output_tokens`, with `concurrency` requests always running.

    A request that ends makes room for the next, which draws its workload; its prompt is filled in mixed rounds.
    """
    loop = _Loop(policy, machine, workloads, seed, state or PlanState())
    done: list[Round] = []
    written = 0
    while written < output_tokens:
        while len(loop.running) < concurrency:
            loop.add(loop.now_ms / 1e3)
        done.append(loop.round())
        written += done[-1].num_tokens
    return done


def replay(
    policy: Policy,
    machine: Machine,
    workloads: Sequence[Workload],
    arrivals_s: Sequence[float],
    max_running: int,
    seed: int,
    state: PlanState | None = None,
) -> tuple[list[Round], list[Served]]:
    """Return the rounds and the requests, in the order of their ends, when they arrive at `arrivals_s`, ascending.

    At most `max_running` take part in a round; the others wait their turn.
    """
    loop = _Loop(policy, machine, workloads, seed, state or PlanState())
    done: list[Round] = []
    left = list(reversed(arrivals_s))
    while left or loop.running:
        if not loop.running:
            loop.now_ms = max(loop.now_ms, left[-1] * 1e3)
        while left and left[-1] * 1e3 <= loop.now_ms:
            loop.add(left.pop())
        done.append(loop.round(max_running))
    return done, loop.served


class _Loop:
    """The machine at work. `running` are all requests that have arrived and not ended."""

    def __init__(
        self, policy: Policy, machine: Machine, workloads: Sequence[Workload], seed: int, state: PlanState
    ) -> None:
        self._policy, self._machine, self._workloads = policy, machine, workloads
        self._names = frozenset(machine.draft_ms)
        self._seed = seed
        self._state = state
        self._noise = random.Random(f"{seed} noise")
        self._started = 0
        self.now_ms = 0.0
        self.running: list[_Text] = []
        self.served: list[Served] = []

    def add(self, arrived_s: float) -> None:
        """Let the next request arrive."""
        text = self._next_text()
        text.arrived_s = arrived_s
        self.running.append(text)
        self._state.arrivals = arrived(self._state.arrivals, arrived_s)

    def _next_text(self) -> _Text:
        chance = random.Random(f"{self._seed} text {self._started}")
        workload = self._workloads[self._started % len(self._workloads)]
        text = _Text(f"{self._seed}.{self._started}", workload)
        self._started += 1
        length = workload.output_tokens + 80
        text.found = {name: [] for name in self._names}
        text.right = {name: [] for name in self._names}
        number = chance.randrange(len(workload.stretches))
        while min(len(found) for found in text.found.values()) < length:
            stretch = workload.stretches[number % len(workload.stretches)]
            size = 1 + int(chance.expovariate(1.0 / stretch.mean_tokens))
            for name in sorted(self._names):
                finds, fits = stretch.chances.get(name, (0.0, 0.0))
                text.found[name] += [chance.random() < finds for _ in range(size)]
                text.right[name] += [chance.random() < fits for _ in range(size)]
            number += 1
        return text

    def round(self, max_running: int = 1_000_000) -> Round:
        """Return one round, after which those that are done are gone."""
        running = self.running[:max_running]
        decoding = [text for text in running if text.written]
        filling = [text for text in running if not text.written]
        choices = self._plan(decoding)
        drafts: list[DraftResult] = []
        gammas: dict[str, list[int]] = {}
        behind: dict[str, int] = {}
        emitted, tokens = 0, len(decoding)
        for text, choice in zip(decoding, choices, strict=True):
            accepted = 0
            if choice.proposer is not None:
                drafted, accepted = text.draft(choice.proposer, choice.gamma)
                tokens += drafted
                gammas.setdefault(choice.proposer, []).append(choice.gamma)
                context = text.workload.prompt_tokens + text.written
                missing = context - text.drafted_at.get(choice.proposer, 0)
                behind[choice.proposer] = behind.get(choice.proposer, 0) + missing
                text.drafted_at[choice.proposer] = context
                drafts.append(DraftResult(text.request_id, "default", choice.proposer, choice.gamma, drafted, accepted))
            emitted += min(accepted + 1, text.workload.output_tokens - text.written)
            text.written += accepted + 1
        return self._settle(choices, drafts, gammas, behind, tokens, filling, emitted)

    def _plan(self, decoding: Sequence[_Text]) -> tuple[Choice, ...]:
        if not decoding:
            return ()
        views = tuple(
            RequestObservation(
                text.request_id,
                context_tokens=text.workload.prompt_tokens + text.written,
                remaining_tokens=text.workload.output_tokens - text.written,
                has_prediction=any(PREDICTION in stretch.chances for stretch in text.workload.stretches),
            )
            for text in decoding
        )
        plan, self._state = plan_round(Observation(views, self._names, self.now_ms / 1e3), self._policy, self._state)
        return plan.choices

    def _settle(
        self,
        choices: tuple[Choice, ...],
        drafts: list[DraftResult],
        gammas: Mapping[str, Sequence[int]],
        behind: Mapping[str, int],
        tokens: int,
        filling: Sequence[_Text],
        emitted: int,
    ) -> Round:
        machine = self._machine
        prompt = self._fill(filling)
        num_waiting = sum(not text.written for text in self.running)
        spent = []
        for name, asked in sorted(gammas.items()):
            draft_ms = machine.draft_ms[name](asked) + behind[name] * machine.catch_up_ms.get(name, 0.0)
            spent.append((name, max(asked), self._measured(draft_ms)))
        score_ms = self._measured(machine.score_ms(len(choices), tokens) if choices else 0.0)
        score_ms += prompt * machine.prefill_ms
        result = RoundResult(
            tuple(drafts),
            len(choices) + len(filling),
            tokens + prompt,
            score_ms,
            tuple(spent),
            num_prefill_tokens=prompt,
        )
        self._state = learn_round(result, self._state)
        ms = score_ms + sum(took for _, _, took in spent)
        start_s = self.now_ms / 1e3
        self.now_ms += ms
        for text in filling:
            if text.filled == text.workload.prompt_tokens:
                text.written, text.first_token_s = 1, self.now_ms / 1e3
                emitted += 1
        self._let_go()
        return Round(ms, emitted, choices, self._state.switch.speculating, start_s, num_waiting)

    def _fill(self, filling: Sequence[_Text]) -> int:
        """Return the prompt tokens of this round, first come, first served."""
        left = self._machine.prompt_share
        for text in filling:
            taken = min(text.workload.prompt_tokens - text.filled, left)
            text.filled += taken
            left -= taken
        return self._machine.prompt_share - left

    def _let_go(self) -> None:
        for text in self.running:
            if text.written >= text.workload.output_tokens:
                times = text.arrived_s, text.first_token_s, self.now_ms / 1e3
                self.served.append(Served(*times, text.workload.output_tokens))
        self.running = [text for text in self.running if text.written < text.workload.output_tokens]

    def _measured(self, ms: float) -> float:
        slow = 2.0 if self._noise.random() < 0.01 else 1.0
        return ms * slow * self._noise.lognormvariate(0.0, self._machine.noise)
