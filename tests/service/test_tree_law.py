"""Trees: sample-and-walk and recursive rejection keep the target's law for every shape, and mutants do not."""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.branches import Coins, Draws, Run, drawn_token, runs
from support.laws import Law, Prefix, Table, continued, random_table, target_law

from specserve.service import acceptance
from specserve.service.acceptance import ratio_test, recursive_rejection, residual, walk_chain, walk_tree
from specserve.service.trees import children, depths, is_chain, is_tree, main_branch_first, paths

EXACT = 1e-12
SHAPES = {
    "chain": (0, 1, 2, 3),
    "star": (0, 0, 0),
    "right branch first": (0, 1, 0, 3),
    "right branch last": (0, 0, 2, 3),
    "levels": (0, 0, 1, 1, 2, 2),
    "comb": (0, 0, 1, 1, 3),
    "interleaved": (0, 0, 1, 2, 3, 4),
}
Walk = Callable[[Sequence[int], Sequence[int], Sequence[int]], tuple[tuple[int, ...], tuple[int, ...]]]
Rule = Callable[[Sequence[int], Sequence[int], torch.Tensor, torch.Tensor, Any, Any], tuple[Prefix, Prefix]]


@pytest.fixture(autouse=True)
def _drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "inverse_cdf", drawn_token)


def prefixes(parents: Sequence[int], tokens: Sequence[int]) -> list[Prefix]:
    """Return the draft tokens on the way to every node."""
    return [tuple(tokens[node - 1] for node in path[1:]) for path in paths(parents)]


def distinct(parents: Sequence[int], vocab_size: int) -> Iterator[Prefix]:
    """Yield every way to put tokens on a tree whose siblings differ."""
    return (tokens for tokens in itertools.product(range(vocab_size), repeat=len(parents)) if is_tree(parents, tokens))


def joint(outcomes: Iterator[tuple[float, Prefix]], target: Table, num_tokens: int) -> Law:
    probs: dict[Prefix, float] = defaultdict(float)
    forbidden = set()
    for weight, emitted in outcomes:
        if any(float(target(emitted[:place])[token]) == 0.0 for place, token in enumerate(emitted)):
            forbidden.add(emitted)
        for tokens, share in continued(target, emitted, num_tokens):
            probs[tokens] += weight * share
    return Law(dict(probs), frozenset(forbidden))


def walked(walk: Walk, parents: Sequence[int], tokens: Prefix, target: Table) -> Iterator[tuple[float, Prefix]]:
    """Yield (weight, emitted) for every choice of the target at every node."""
    rows = [target(prefix).tolist() for prefix in prefixes(parents, tokens)]
    for own in itertools.product(range(target.vocab_size), repeat=len(rows)):
        weight = math.prod(row[token] for row, token in zip(rows, own, strict=True))
        if weight > 0.0:
            _, emitted = walk(parents, tokens, own)
            yield weight, emitted


def walks_lawfully(walk: Walk, parents: Sequence[int], tokens: Prefix, target: Table) -> bool:
    num_tokens = max(depths(parents)) + 1
    return (
        joint(walked(walk, parents, tokens, target), target, num_tokens).distance(target_law(target, num_tokens))
        < EXACT
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_sample_and_walk_has_the_targets_law_on_every_tree(shape: str) -> None:
    parents = SHAPES[shape]
    target = random_table(3, max(depths(parents)) + 1, 5, 0.2)
    some = list(distinct(parents, 3))
    for tokens in some[:: max(1, len(some) // 6)]:
        assert walks_lawfully(walk_tree, parents, tokens, target)


def test_a_walk_accepts_the_sum_of_all_path_probabilities() -> None:
    parents, tokens = SHAPES["comb"], (2, 0, 1, 0, 2)
    target = random_table(3, 4, 9)
    mean = sum(weight * (len(emitted) - 1) for weight, emitted in walked(walk_tree, parents, tokens, target))
    found = prefixes(parents, tokens)[1:]
    expected = sum(math.prod(float(target(path[:i])[token]) for i, token in enumerate(path)) for path in found)
    assert mean == pytest.approx(expected, abs=EXACT)


def test_a_walk_names_its_nodes_and_a_chain_is_walked_as_a_chain() -> None:
    assert walk_tree((0, 0, 2, 2), (5, 6, 7, 8), (6, 0, 8, 0, 9)) == ((2, 4), (6, 8, 9))
    assert walk_tree((0, 0), (5, 6), (7, 1, 2)) == ((), (7,))
    for own in itertools.product(range(3), repeat=4):
        path, emitted = walk_tree((0, 1, 2), (0, 1, 2), own)
        assert (len(path), emitted) == walk_chain((0, 1, 2), own)


def first_child(parents: Sequence[int], tokens: Sequence[int], own: Sequence[int]) -> tuple[Prefix, Prefix]:
    """Descend to the first child whatever it holds."""
    path, emitted, node = [], [], 0
    while True:
        emitted.append(own[node])
        below = children(parents)[node]
        if not below or own[node] not in [tokens[child - 1] for child in below]:
            return tuple(path), tuple(emitted)
        node = below[0]
        path.append(node)


def cousin(parents: Sequence[int], tokens: Sequence[int], own: Sequence[int]) -> tuple[Prefix, Prefix]:
    """Descend to any node one deeper that holds the token."""
    path, emitted, node, deep = [], [], 0, depths(parents)
    while True:
        emitted.append(own[node])
        found = [n for n in range(1, len(deep)) if deep[n] == deep[node] + 1 and tokens[n - 1] == own[node]]
        if not found:
            return tuple(path), tuple(emitted)
        node = found[0]
        path.append(node)


def parents_row(parents: Sequence[int], tokens: Sequence[int], own: Sequence[int]) -> tuple[Prefix, Prefix]:
    """Read the token of the node's parent."""
    return walk_tree(parents, tokens, [own[parent] for parent in (0, *parents)])


@pytest.mark.parametrize("walk", [first_child, cousin, parents_row])
def test_a_mutated_walk_is_caught(walk: Walk) -> None:
    parents, tokens = SHAPES["levels"], (0, 1, 0, 1, 1, 2)
    target = random_table(3, 3, 5)
    assert walks_lawfully(walk_tree, parents, tokens, target)
    assert not walks_lawfully(walk, parents, tokens, target)


def drawn_trees(parents: Sequence[int], draft: Table) -> Iterator[tuple[float, Prefix, torch.Tensor]]:
    """Yield (weight, tokens, rows) of every tree whose siblings are drawn without replacement from `draft`."""
    below = children(parents)
    for tokens in distinct(parents, draft.vocab_size):
        found = prefixes(parents, tokens)
        weight = 1.0
        for node, group in enumerate(below):
            row, left = draft(found[node]).tolist(), 1.0
            for child in group:
                prob = row[tokens[child - 1]]
                weight *= prob / left if left > 1e-12 and prob > 0.0 else 0.0
                left -= prob
        if weight > 0.0:
            yield weight, tokens, torch.stack([draft(found[parent]) for parent in parents])


def decided(rule: Rule, parents: Sequence[int], target: Table, draft: Table) -> Iterator[tuple[float, Prefix]]:
    for weight, tokens, q in drawn_trees(parents, draft):
        found = prefixes(parents, tokens)
        p = torch.stack([target(prefix) for prefix in found])
        seen: list[tuple[float, Prefix]] = []

        def once(run: Run) -> None:
            path, emitted = rule(parents, tokens, p, q, Coins(run), Draws(run))  # noqa: B023
            assert emitted[:-1] == (found[path[-1]] if path else ())  # noqa: B023
            seen.append((weight * run.weight, emitted))  # noqa: B023

        runs(once)
        yield from seen


def decides_lawfully(rule: Rule, parents: Sequence[int], target: Table, draft: Table) -> bool:
    num_tokens = max(depths(parents)) + 1
    law = joint(decided(rule, parents, target, draft), target, num_tokens)
    return law.distance(target_law(target, num_tokens)) < EXACT and not law.forbidden


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", SHAPES)
def test_recursive_rejection_has_the_targets_law_on_every_tree(shape: str, seed: int) -> None:
    parents = SHAPES[shape]
    length = max(depths(parents)) + 1
    target, draft = random_table(3, length, 2 * seed, 0.3 * (seed % 2)), random_table(3, length, 2 * seed + 1)
    assert decides_lawfully(recursive_rejection, parents, target, draft)


def test_recursive_rejection_has_the_targets_law_where_the_draft_can_draw_few_tokens() -> None:
    target, draft = random_table(4, 3, 3, 0.3), random_table(4, 3, 4, 0.5)
    assert decides_lawfully(recursive_rejection, (0, 0, 1), target, draft)
    assert decides_lawfully(recursive_rejection, (0, 0, 1), target, target)


def test_a_chain_is_tested_as_a_chain() -> None:
    def chain(
        parents: Sequence[int], tokens: Sequence[int], p: torch.Tensor, q: torch.Tensor, accept: Any, residuals: Any
    ) -> tuple[Prefix, Prefix]:
        num_accepted, emitted = ratio_test(tokens, p, q, accept, residuals)
        return tuple(range(1, num_accepted + 1)), emitted

    target, draft = random_table(3, 4, 1), random_table(3, 4, 2)
    pairs = zip(*(list(decided(rule, (0, 1, 2), target, draft)) for rule in (recursive_rejection, chain)), strict=True)
    assert all(mine == theirs for mine, theirs in pairs)


def test_siblings_raise_what_is_accepted() -> None:
    target, draft = random_table(4, 2, 1), random_table(4, 2, 2)
    accepted = [
        sum(weight for weight, emitted in decided(recursive_rejection, parents, target, draft) if len(emitted) == 2)
        for parents in ((0,), (0, 0), (0, 0, 0))
    ]
    assert accepted[0] + 0.02 < accepted[1] < accepted[2]


@dataclass(frozen=True)
class Variant:
    """Recursive rejection as a few replaceable steps; the defaults are the right ones."""

    next_draft: Callable[[torch.Tensor, int], torch.Tensor] = acceptance._without
    next_target: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = residual
    passes: Callable[[Any, float, float], bool] = lambda u, p, q: u * q < p
    coin: Callable[[int], int] = lambda child: child
    row: Callable[[int], int] = lambda node: node
    siblings: int = 9

    def __call__(
        self,
        parents: Sequence[int],
        tokens: Sequence[int],
        p: torch.Tensor,
        q: torch.Tensor,
        accept: Any,
        residuals: Any,
    ) -> tuple[Prefix, Prefix]:
        below, path = children(parents), [0]
        while True:
            node = path[-1]
            left, drawn = p[self.row(node)], q[max(below[node], default=1) - 1]
            for child in below[node][: self.siblings]:
                token = tokens[child - 1]
                if self.passes(accept[self.coin(child)], float(left[token]), float(drawn[token])):
                    path.append(child)
                    break
                left, drawn = self.next_target(left, drawn), self.next_draft(drawn, token)
            else:
                emitted = tuple(tokens[n - 1] for n in path[1:])
                return tuple(path[1:]), (*emitted, drawn_token(left, residuals[node]))


MUTANTS: dict[str, Variant] = {
    "does not remove the sibling from q": Variant(next_draft=lambda drawn, token: drawn),
    "does not renormalise q": Variant(next_draft=lambda drawn, token: drawn * (torch.arange(len(drawn)) != token)),
    "tests siblings against p itself": Variant(next_target=lambda left, drawn: left),
    "removes the sibling from p": Variant(
        next_target=lambda left, drawn: (
            left * (drawn != drawn.max()) if float(left[drawn != drawn.max()].sum()) else left
        )
    ),
    "accepts always": Variant(passes=lambda u, p, q: True),
    "accepts with p": Variant(passes=lambda u, p, q: u < p),
    "tests siblings with one number": Variant(coin=lambda child: 0),
    "goes on with the row of the root": Variant(row=lambda node: 0),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutated_recursive_rejection_is_caught(name: str) -> None:
    target, draft = random_table(3, 3, 21), random_table(3, 3, 22)
    assert not decides_lawfully(MUTANTS[name], (0, 0, 1, 1), target, draft)


@pytest.mark.parametrize("siblings", [0, 1, 9])
def test_testing_fewer_siblings_is_lawful(siblings: int) -> None:
    target, draft = random_table(3, 3, 21), random_table(3, 3, 22)
    assert decides_lawfully(Variant(siblings=siblings), (0, 0, 1, 1), target, draft)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_main_branch_goes_first_and_the_tree_stays_the_same(shape: str) -> None:
    parents = SHAPES[shape]
    tokens = tuple(range(10, 10 + len(parents)))
    new_parents, new_tokens = main_branch_first(parents, tokens)
    assert sorted(prefixes(new_parents, new_tokens)) == sorted(prefixes(parents, tokens))
    first = [0]
    while children(parents)[first[-1]]:
        first.append(children(parents)[first[-1]][0])
    assert new_tokens[: len(first) - 1] == tuple(tokens[node - 1] for node in first[1:])
    assert is_chain(new_parents[: len(first) - 1])


def test_a_tree_is_known_by_its_parents() -> None:
    assert is_chain((0, 1, 2))
    assert is_chain(())
    assert not is_chain((0, 0))
    assert is_tree((0, 0, 1), (4, 5, 4))
    assert not is_tree((0, 0, 1), (4, 4, 5)), "siblings differ"
    assert not is_tree((0, 2), (4, 5)), "a parent comes first"
    assert not is_tree((0, -1), (4, 5))
    assert not is_tree((0,), (4, 5))
    assert depths((0, 0, 1, 3)) == [0, 1, 1, 2, 3]
    assert paths((0, 0, 1, 3)) == [(0,), (0, 1), (0, 2), (0, 1, 3), (0, 1, 3, 4)]
    assert children((0, 0, 1, 3)) == [[1, 2], [3], [], [4], []]
