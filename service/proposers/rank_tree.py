"""Medusa's tree: which of each head's best tokens are tried after which, chosen once for all texts.

All heads read one hidden state, so a token is named by its rank among its head's. Source: arXiv 2401.10774 section 2.3.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..trees import depths, main_branch_first

Accuracies = tuple[tuple[float, ...], ...]
"""By head, how often the token of each rank is right: the likeliest token's rank is 0."""

NUM_RANKS = 10
BEST, BEST_AFTER, NEXT = 0.6, 0.8, 0.35
"""What is taken for granted of heads that were never measured: how often the first one's best token is right, how much
less often that of each head after it, and how often, where no better token was right, the next one is."""


@dataclass(frozen=True, slots=True)
class RankTree:
    """A tree (`trees.py`) whose every node is its head's token of that rank; a node's head is its depth less one."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def heads(self) -> tuple[int, ...]:
        """The head of every node."""
        return tuple(depth - 1 for depth in depths(self.parents)[1:])


def stated_accuracies(stated: Mapping[str, Any], num_heads: int) -> Accuracies:
    """Return what training measured of the heads, or what is known of such heads where it says nothing.

    Where it only says how often the best tokens of the first 1, 2, ... heads are all right, other ranks are guessed.
    """
    training = stated.get("specserve_training", {})
    measured, matches = training.get("held_out_ranks", ()), training.get("held_out_matches", ())
    if len(measured) >= num_heads:
        return tuple(tuple(float(share) for share in shares) for shares in measured[:num_heads])
    if len(matches) >= num_heads:
        before = (1.0, *matches)
        return tuple(_guessed(float(share) / max(before[head], 1e-9)) for head, share in enumerate(matches[:num_heads]))
    return tuple(_guessed(BEST * BEST_AFTER**head) for head in range(num_heads))


def _guessed(best: float) -> tuple[float, ...]:
    """Return the accuracies of a head whose best token is right so often."""
    return (best, *(min(best, (1 - best) * NEXT * (1 - NEXT) ** rank) for rank in range(NUM_RANKS - 1)))


def likeliest_tree(accuracies: Sequence[Sequence[float]], num_nodes: int) -> RankTree:
    """Return the tree of at most `num_nodes` nodes with the largest expected number of accepted tokens.

    A node is accepted as often as all on the way to it are right, taken as independent: the product of their
    accuracies. The trees of fewer nodes are parts of this one.
    """
    parents: list[int] = []
    ranks: list[int] = []
    open_ends = [(-accuracy, 0, rank, 0) for rank, accuracy in enumerate(accuracies[0])]
    heapq.heapify(open_ends)
    while open_ends and len(parents) < num_nodes:
        negative, parent, rank, head = heapq.heappop(open_ends)
        if negative == 0.0:
            break
        parents.append(parent)
        ranks.append(rank)
        if head + 1 < len(accuracies):
            for next_rank, accuracy in enumerate(accuracies[head + 1]):
                heapq.heappush(open_ends, (negative * accuracy, len(parents), next_rank, head + 1))
    return RankTree(*main_branch_first(parents, ranks))
