"""Exact output laws of acceptance rules: every branch of the randomness is visited, with its weight, in float64.

A rule reads its uniform numbers from lazy sequences. A number that is read for the first time splits the run into one
branch for each interval between breakpoints (the midpoint stands for the interval, its width is the weight); a number
that is never read splits nothing. The rule under test is run unchanged.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

import torch

from specserve.service.acceptance import inverse_cdf, residual

Prefix = tuple[int, ...]
Rule = Callable[
    [Sequence[int], torch.Tensor, torch.Tensor, Sequence[float], Sequence[float]], tuple[int, tuple[int, ...]]
]


@dataclass(frozen=True, slots=True)
class Table:
    """A toy language model: the next token's probabilities [vocab] float64 after every prefix shorter than `length`."""

    rows: dict[Prefix, torch.Tensor]

    def __call__(self, prefix: Sequence[int]) -> torch.Tensor:
        return self.rows[tuple(prefix)]

    @property
    def vocab_size(self) -> int:
        return len(self.rows[()])


def table(vocab_size: int, length: int, row: Callable[[Prefix], Iterable[float]]) -> Table:
    """Return the table whose row after a prefix is `row(prefix)`, normalised."""
    rows = {}
    for size in range(length):
        for prefix in itertools.product(range(vocab_size), repeat=size):
            weights = torch.tensor(list(row(prefix)), dtype=torch.float64)
            rows[prefix] = weights / weights.sum()
    return Table(rows)


def random_table(vocab_size: int, length: int, seed: int, zero_share: float = 0.0) -> Table:
    """Return a table of random rows, of which about `zero_share` of the probabilities are zero."""
    generator = torch.Generator().manual_seed(seed)

    def row(_: Prefix) -> list[float]:
        weights = torch.rand(vocab_size, generator=generator, dtype=torch.float64) ** 2 + 1e-3
        kept = torch.rand(vocab_size, generator=generator) >= zero_share
        kept[int(torch.randint(vocab_size, (1,), generator=generator))] = True
        return [float(weight) for weight in weights * kept]

    return table(vocab_size, length, row)


@dataclass(frozen=True, slots=True)
class Law:
    """An output law: probabilities of token sequences, and sequences that appeared although the target forbids them."""

    probs: dict[Prefix, float]
    forbidden: frozenset[Prefix] = frozenset()

    def distance(self, other: "Law") -> float:
        """Return the total-variation distance."""
        keys = self.probs.keys() | other.probs.keys()
        return 0.5 * sum(abs(self.probs.get(key, 0.0) - other.probs.get(key, 0.0)) for key in keys)


def target_law(target: Table, num_tokens: int) -> Law:
    """Return the law of plain decoding: the joint of the first `num_tokens` tokens."""
    return Law(dict(continued(target, (), num_tokens)))


class _Run:
    """One run through the tree of branches: follows `script`, then takes first branches, and notes what it saw."""

    def __init__(self, script: Sequence[int]) -> None:
        self._script = script
        self.taken: list[tuple[int, int]] = []
        self.weight = 1.0

    def choose(self, options: Sequence[tuple[float, float]]) -> float:
        place = len(self.taken)
        index = self._script[place] if place < len(self._script) else 0
        self.taken.append((index, len(options)))
        value, weight = options[index]
        self.weight *= weight
        return value

    def next_script(self) -> list[int] | None:
        for place in reversed(range(len(self.taken))):
            index, count = self.taken[place]
            if index + 1 < count:
                return [taken for taken, _ in self.taken[:place]] + [index + 1]
        return None


@dataclass(slots=True)
class Uniforms(Sequence[float]):
    """Lazy uniform numbers: reading one chooses a branch; reading it again repeats the number."""

    run: _Run
    breakpoints: Callable[[int], Iterable[float]]
    with_zero: bool = False
    drawn: dict[int, float] = field(default_factory=dict)

    @overload
    def __getitem__(self, index: int) -> float: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[float]: ...
    def __getitem__(self, index: int | slice) -> float | Sequence[float]:
        assert isinstance(index, int)
        if index not in self.drawn:
            self.drawn[index] = self.run.choose(_options(self.breakpoints(index), self.with_zero))
        return self.drawn[index]

    def __len__(self) -> int:
        raise AssertionError("a rule reads its numbers by position")


def _options(breakpoints: Iterable[float], with_zero: bool) -> list[tuple[float, float]]:
    # Breakpoints that differ by rounding alone are one.
    edges = [0.0]
    for point in sorted(breakpoints):
        if edges[-1] + 1e-15 < point < 1.0 - 1e-15:
            edges.append(point)
    edges.append(1.0)
    options = [((low + high) / 2, high - low) for low, high in itertools.pairwise(edges)]
    # u = 0 has no weight, but generators do return it: what it lets through is seen by `Law.forbidden`.
    return [*options, (0.0, 0.0)] if with_zero else options


def _edges(weights: torch.Tensor) -> list[float]:
    total = float(weights.sum())
    return [float(edge) / total for edge in weights.cumsum(-1)] if total > 0.0 else []


@dataclass(slots=True)
class Round:
    """What a drafting function sees, and leaves: its own uniform numbers, the drafted tokens and their q rows."""

    draft: Table
    gamma: int
    uniforms: Sequence[float] = ()
    token_ids: list[int] = field(default_factory=list)
    rows: list[torch.Tensor] = field(default_factory=list)


def sampled(round_: Round) -> None:
    """Draft as one should: each token drawn from the very row that is reported."""
    while len(round_.token_ids) < round_.gamma:
        row = round_.draft(round_.token_ids)
        token = inverse_cdf(row, round_.uniforms[len(round_.token_ids)])
        round_.rows.append(row)
        round_.token_ids.append(token)


def one_hot_argmax(round_: Round) -> None:
    """Draft deterministically and report it as such: the best token, with q one-hot."""
    while len(round_.token_ids) < round_.gamma:
        token = int(round_.draft(round_.token_ids).argmax())
        round_.rows.append(torch.eye(round_.draft.vocab_size, dtype=torch.float64)[token])
        round_.token_ids.append(token)


def output_law(
    rule: Rule,
    target: Table,
    draft: Table,
    gamma: int,
    drafting: Callable[[Round], None] = sampled,
    *,
    fine: bool = False,
    share_draft_noise: bool = False,
) -> Law:
    """Return the law of the first gamma + 1 tokens of one round, shorter outputs being continued by the target.

    `fine` adds the breakpoints that wrong rules need; `share_draft_noise` wires the residual numbers to the draft's.
    """
    probs: dict[Prefix, float] = defaultdict(float)
    forbidden: set[Prefix] = set()
    script: list[int] | None = []
    while script is not None:
        run = _Run(script)
        emitted = _one_round(run, rule, target, Round(draft, gamma), drafting, fine, share_draft_noise)
        script = run.next_script()
        assert len(emitted) <= gamma + 1
        if any(float(target(emitted[:place])[token]) == 0.0 for place, token in enumerate(emitted)):
            forbidden.add(emitted)
        for tokens, share in continued(target, emitted, gamma + 1):
            probs[tokens] += run.weight * share
    return Law(dict(probs), frozenset(forbidden))


def _one_round(
    run: _Run,
    rule: Rule,
    target: Table,
    state: Round,
    drafting: Callable[[Round], None],
    fine: bool,
    share_draft_noise: bool,
) -> Prefix:
    """Return what `rule` emits on one branch."""

    def draft_edges(place: int) -> list[float]:
        p, q = target(state.token_ids), state.draft(state.token_ids)
        return [*_edges(q), *_edges(p), *_edges((p - q).clamp(min=0.0))] if share_draft_noise else _edges(q)

    def accept_edges(place: int) -> list[float]:
        token, q = state.token_ids[place], float(state.rows[place][state.token_ids[place]])
        ratios = [float(row[token]) / q for row in p_rows[place : place + (2 if fine else 1)] if q > 0.0]
        if not fine:
            return ratios
        return [*ratios, *(1.0 / ratio for ratio in ratios if ratio > 0.0), *(ratio * q for ratio in ratios)]

    def residual_edges(place: int) -> list[float]:
        p = p_rows[place]
        q = state.rows[place] if place < len(state.rows) else p
        points = [*_edges(p), *_edges(residual(p, q))]
        if fine:
            raw, wrong = (p - q).clamp(min=0.0).cumsum(-1), ((q - p).clamp(min=0.0), (q - p).abs(), q, *p_rows)
            points += [*raw.tolist(), *itertools.chain.from_iterable(map(_edges, wrong))]
            # A rule that looks at the next target row corrects from it, too.
            points += itertools.chain.from_iterable(_edges(residual(row, q)) for row in p_rows[place + 1 : place + 2])
        return points

    state.uniforms = Uniforms(run, draft_edges)
    drafting(state)
    tokens = tuple(state.token_ids)
    p_rows = [target(tokens[:place]) for place in range(len(tokens) + 1)]
    q_rows = torch.stack(state.rows) if state.rows else torch.zeros(0, target.vocab_size, dtype=torch.float64)
    with_zero = any(float(row.min()) == 0.0 for row in p_rows)
    accept = Uniforms(run, accept_edges, with_zero)
    residuals = state.uniforms if share_draft_noise else Uniforms(run, residual_edges, with_zero)
    return tuple(rule(tokens, torch.stack(p_rows), q_rows, accept, residuals)[1])


def continued(target: Table, tokens: Prefix, num_tokens: int) -> Iterator[tuple[Prefix, float]]:
    """Yield every continuation of `tokens` to `num_tokens`, with the target's probability of the continuation."""
    if len(tokens) >= num_tokens:
        yield tokens, 1.0
        return
    for token, prob in enumerate(target(tokens).tolist() if tokens in target.rows else [1.0]):
        if prob > 0.0:
            for longer, share in continued(target, (*tokens, token), num_tokens):
                yield longer, prob * share
