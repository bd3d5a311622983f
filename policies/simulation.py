"""A closed loop of requests on an imagined machine: what a policy would earn, with every chance drawn from a seed."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

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
    prompt. Every measurement is multiplied by log-normal noise; one in a hundred takes twice as long.
    """

    score_ms: Callable[[int, int], float]
    draft_ms: Mapping[str, Callable[[Sequence[int]], float]]
    noise: float = 0.05
    catch_up_ms: Mapping[str, float] = field(default_factory=dict)
    prefill_ms: float = 0.1


@dataclass(frozen=True, slots=True)
class Round:
    """What one simulated round took and gave."""

    ms: float
    num_tokens: int
    choices: tuple[Choice, ...]
    speculating: bool


@dataclass(slots=True)
class _Text:
    """One request's text: by proposer, at which positions a draft is found and which tokens it gets right.

    What fits is a property of the text, not of the policy, so policies that run on one seed meet the same luck.
    """

    request_id: str
    workload: Workload
    found: dict[str, list[bool]] = field(default_factory=dict)
    right: dict[str, list[bool]] = field(default_factory=dict)
    written: int = 0
    prefilled: bool = False
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

    A request that ends makes room for the next, which draws its workload; its prompt is filled in one mixed round.
    """
    return list(_Loop(policy, machine, workloads, concurrency, seed, state or PlanState()).rounds(output_tokens))


class _Loop:
    def __init__(
        self,
        policy: Policy,
        machine: Machine,
        workloads: Sequence[Workload],
        concurrency: int,
        seed: int,
        state: PlanState,
    ) -> None:
        self._policy, self._machine, self._workloads = policy, machine, workloads
        self._names = frozenset(machine.draft_ms)
        self._seed, self._concurrency = seed, concurrency
        self._state = state
        self._noise = random.Random(f"{seed} noise")
        self._started = 0
        self._now_ms = 0.0
        self._running: list[_Text] = []

    def rounds(self, output_tokens: int) -> "list[Round]":
        done: list[Round] = []
        written = 0
        while written < output_tokens:
            while len(self._running) < self._concurrency:
                self._running.append(self._next_text())
            done.append(self._round())
            written += done[-1].num_tokens
        return done

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

    def _round(self) -> Round:
        decoding = [text for text in self._running if text.prefilled]
        filling = [text for text in self._running if not text.prefilled]
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
        plan, self._state = plan_round(Observation(views, self._names, self._now_ms / 1e3), self._policy, self._state)
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
        prompt = sum(text.workload.prompt_tokens for text in filling)
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
        for text in filling:
            text.prefilled, text.written = True, 1
            emitted += 1
        self._running = [text for text in self._running if text.written < text.workload.output_tokens]
        ms = score_ms + sum(took for _, _, took in spent)
        self._now_ms += ms
        return Round(ms, emitted, choices, self._state.switch.speculating)

    def _measured(self, ms: float) -> float:
        slow = 2.0 if self._noise.random() < 0.01 else 1.0
        return ms * slow * self._noise.lognormvariate(0.0, self._machine.noise)
