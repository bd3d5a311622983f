"""Block verification: the target's law over all branches, never fewer tokens than token by token, and no mutant."""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.branches import Coins, Draws, Run, drawn_token, runs
from support.laws import Law, Prefix, Table, continued, random_table, table, target_law

from specserve.service import acceptance
from specserve.service.acceptance import block_test, ratio_test, residual

EXACT = 1e-12
Rule = Callable[[Sequence[int], torch.Tensor, torch.Tensor, Any, Any], tuple[int, tuple[int, ...]]]


@pytest.fixture(autouse=True)
def _drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "inverse_cdf", drawn_token)


def outcomes(rule: Rule, target: Table, draft: Table, gamma: int) -> Iterator[tuple[float, int, Prefix]]:
    """Yield (weight, accepted, emitted) of every draft and branch."""
    for tokens in itertools.product(range(draft.vocab_size), repeat=gamma):
        rows = [draft(tokens[:place]) for place in range(gamma)]
        share = math.prod(float(row[token]) for row, token in zip(rows, tokens, strict=True))
        if share == 0.0:
            continue
        p = torch.stack([target(tokens[:place]) for place in range(gamma + 1)])
        q = torch.stack(rows) if rows else torch.zeros(0, draft.vocab_size).double()
        found: list[tuple[float, int, Prefix]] = []

        def once(run: Run) -> None:
            num_accepted, emitted = rule(tokens, p, q, Coins(run), Draws(run))  # noqa: B023
            assert emitted[:-1] == tokens[:num_accepted]  # noqa: B023
            found.append((share * run.weight, num_accepted, emitted))  # noqa: B023

        runs(once)
        yield from found


def law_of(rule: Rule, target: Table, draft: Table, gamma: int) -> Law:
    probs: dict[Prefix, float] = defaultdict(float)
    forbidden = set()
    for weight, _, emitted in outcomes(rule, target, draft, gamma):
        if any(float(target(emitted[:place])[token]) == 0.0 for place, token in enumerate(emitted)):
            forbidden.add(emitted)
        for tokens, share in continued(target, emitted, gamma + 1):
            probs[tokens] += weight * share
    return Law(dict(probs), frozenset(forbidden))


def is_lawful(rule: Rule, target: Table, draft: Table, gamma: int) -> bool:
    law = law_of(rule, target, draft, gamma)
    return law.distance(target_law(target, gamma + 1)) < EXACT and not law.forbidden


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("vocab_size", "gamma"), [(3, 0), (3, 1), (5, 1), (3, 2), (4, 2), (3, 3), (2, 4)])
def test_block_verification_has_the_targets_law_for_random_tables(vocab_size: int, gamma: int, seed: int) -> None:
    zeros = 0.3 if seed % 2 else 0.0
    target, draft = (random_table(vocab_size, gamma + 1, 2 * seed + side, zeros) for side in (0, 1))
    assert is_lawful(block_test, target, draft, gamma)


CASES = {
    "equal": ([0.2, 0.3, 0.5], [0.2, 0.3, 0.5]),
    "disjoint": ([0.4, 0.6, 0.0, 0.0], [0.0, 0.0, 0.7, 0.3]),
    "one-hot target": ([0.0, 1.0, 0.0], [0.5, 0.2, 0.3]),
    "one-hot draft": ([0.5, 0.2, 0.3], [0.0, 0.0, 1.0]),
    "one-hot and equal": ([0.0, 1.0, 0.0], [0.0, 1.0, 0.0]),
    "nested supports": ([0.2, 0.3, 0.5, 0.0], [0.0, 0.9, 0.1, 0.0]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_block_verification_has_the_targets_law_in_degenerate_cases(case: str, gamma: int) -> None:
    target, draft = (table(len(row), gamma + 1, lambda _, row=row: row) for row in CASES[case])
    assert is_lawful(block_test, target, draft, gamma)


def at_least(rule: Rule, target: Table, draft: Table, gamma: int) -> list[float]:
    """Return the probabilities that 1, 2, ..., gamma draft tokens or more are accepted."""
    found = [0.0] * gamma
    for weight, num_accepted, _ in outcomes(rule, target, draft, gamma):
        for place in range(num_accepted):
            found[place] += weight
    return found


def test_block_verification_never_accepts_less_than_token_wise_verification_and_often_more() -> None:
    gains = []
    for seed in range(40):
        target, draft = (random_table(3, 4, 2 * seed + side, 0.2 * (seed % 3)) for side in (0, 1))
        pairs = list(zip(at_least(block_test, target, draft, 3), at_least(ratio_test, target, draft, 3), strict=True))
        assert all(block >= token - EXACT for block, token in pairs)
        gains.append(sum(block for block, _ in pairs) / sum(token for _, token in pairs))
    assert sum(gains) / len(gains) > 1.02


def test_the_first_draft_token_alone_is_decided_as_token_wise() -> None:
    target, draft = random_table(4, 2, 1), random_table(4, 2, 2)
    (block,), (token,) = at_least(block_test, target, draft, 1), at_least(ratio_test, target, draft, 1)
    assert block == pytest.approx(token, abs=EXACT)


@dataclass(frozen=True)
class Variant:
    """The rule as a few replaceable steps; the defaults are the right ones."""

    chance: Callable[[float, float], float] = lambda left, joint: left / max(left + 1.0 - joint, 1e-300)
    grows: Callable[[float, float], float] = lambda joint, ratio: min(1.0, joint * ratio)
    last: Callable[[float], float] = lambda joint: joint
    share: Callable[[float], float] = lambda joint: joint
    passes: Callable[[Any, float], bool] = lambda u, chance: u < chance
    coin: Callable[[int], int] = lambda place: place
    longest: bool = True
    bonus_from_residual: bool = False

    def __call__(
        self, tokens: Sequence[int], p: torch.Tensor, q: torch.Tensor, accept: Any, residuals: Any
    ) -> tuple[int, tuple[int, ...]]:
        gamma, joint = len(tokens), [1.0]
        for i, token in enumerate(tokens):
            joint.append(self.grows(joint[-1], float(p[i, token]) / float(q[i, token])))
        chances = [
            self.chance(float((p[i] * joint[i] - q[i]).clamp(min=0.0).sum()), joint[i]) for i in range(1, gamma)
        ] + [self.last(joint[gamma])]
        length = 0
        if self.longest:
            length = next((i for i in range(gamma, 0, -1) if self.passes(accept[self.coin(i)], chances[i - 1])), 0)
        else:
            while length < gamma and self.passes(accept[self.coin(length + 1)], chances[length]):
                length += 1
        if length == gamma and not self.bonus_from_residual:
            return gamma, (*tokens, drawn_token(p[gamma], residuals[gamma]))
        row = min(length, gamma - 1)
        correction = residual(p[length], q[row], self.share(joint[length]))
        return length, (*tokens[:length], drawn_token(correction, residuals[length]))


MUTANTS: dict[str, Variant] = {
    "stops at the first prefix that fails": Variant(longest=False),
    "tests a prefix by its joint ratio": Variant(chance=lambda left, joint: joint),
    "tests a prefix by what is left alone": Variant(chance=lambda left, joint: left),
    "forgets what the prefix is short of": Variant(chance=lambda left, joint: left / (left + 1.0)),
    "lets the joint ratio grow beyond 1": Variant(grows=lambda joint, ratio: joint * ratio),
    "forgets the prefix in the joint ratio": Variant(grows=lambda joint, ratio: min(1.0, ratio)),
    "corrects as after a single token": Variant(share=lambda joint: 1.0),
    "accepts the whole chain always": Variant(last=lambda joint: 1.0),
    "accepts the whole chain never": Variant(last=lambda joint: 0.0, bonus_from_residual=True, share=lambda joint: 1.0),
    "takes the bonus from a residual": Variant(bonus_from_residual=True),
    "tests every prefix with one number": Variant(coin=lambda place: 0),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutated_block_rule_is_caught(name: str) -> None:
    assert not is_lawful(MUTANTS[name], random_table(3, 4, 21), random_table(3, 4, 22), 3)


def test_the_unmutated_variant_is_lawful() -> None:
    assert is_lawful(Variant(), random_table(3, 4, 21), random_table(3, 4, 22), 3)


def test_a_non_strict_comparison_is_caught_because_zero_lets_a_forbidden_token_pass() -> None:
    target, draft = table(3, 3, lambda _: [0.0, 0.4, 0.6]), table(3, 3, lambda _: [0.4, 0.4, 0.2])
    assert is_lawful(block_test, target, draft, 2)
    law = law_of(Variant(passes=lambda u, chance: u <= chance), target, draft, 2)
    assert law.distance(target_law(target, 3)) < EXACT, "the mistake has no weight: only its support shows it"
    assert law.forbidden
