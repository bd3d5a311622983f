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
BEST, BEST_AFTER, NEXT_RANK = 0.6, 0.8, 0.35
"""What is taken for granted of heads that were never measured: how often the first one's best token is right, how much
less often that of each head after it, and the token of each next rank."""


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
    """Return what training measured of the heads, or what is known of such heads where it says nothing."""
    measured = stated.get("specserve_training", {}).get("held_out_ranks")
    if measured is not None and len(measured) >= num_heads:
        return tuple(tuple(float(share) for share in shares) for shares in measured[:num_heads])
    return tuple(
        tuple(BEST * BEST_AFTER**head * NEXT_RANK**rank for rank in range(NUM_RANKS)) for head in range(num_heads)
    )


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
