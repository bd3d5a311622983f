"""EAGLE-2's tree: it grows where the head is confident, and keeps its likeliest nodes. Source: arXiv 2406.16858.

A node's confidence, the product of the head's probabilities on the way to it, stands for its chance to be accepted.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..messages import Draft, ProposeRow
from ..trees import main_branch_first


@dataclass(frozen=True, slots=True)
class TreeLimits:
    """Of a level the `width` most confident nodes are gone on from, each by its `width` likeliest tokens; there are
    `depth` levels at most. More width cost time and found no more on held-out code (DECISIONS.md)."""

    width: int = 4
    depth: int = 8


@dataclass(slots=True, eq=False)
class Node:
    """A token of the tree. One that was fed to the head has a `way`: the places, counted from the last committed
    token's row, of the rows on the way to it, its own last. It `goes_on_from` that one of the rows fed before it."""

    token_id: int
    parent: "Node | None"
    log_confidence: float
    depth: int
    goes_on_from: int = 0
    way: tuple[int, ...] = ()


class ConfidenceTree:
    """A draft being grown, level by level, to the `gamma` most confident of all its nodes.

    A node that is not among these now never will be, nor will what follows it: it is dropped at once, and its row's
    place is free again. So the tree is the paper's, and `gamma` places are enough for all of its rows.
    """

    def __init__(self, row: ProposeRow, limits: TreeLimits) -> None:
        self.row = row
        self._limits = limits
        self._kept: list[Node] = []
        self._level = [Node(-1, None, 0.0, 0, way=(0,))]

    @property
    def complete(self) -> bool:
        """True when there is no node to go on from."""
        return not self._level

    def grow(self, likeliest: Iterator[tuple[Sequence[int], Sequence[float]]]) -> None:
        """Add the nodes that follow the rows fed last and choose those to go on from.

        Each row takes its tokens and their log-probabilities from `likeliest`, the likeliest first.
        """
        depth = self._level[0].depth + 1
        born = [
            Node(token_id, parent, parent.log_confidence + log_prob, depth, place)
            for place, parent in enumerate(self._level)
            for token_id, log_prob in zip(*next(likeliest), strict=True)
            if log_prob > -math.inf
        ]
        self._kept = sorted([*self._kept, *born], key=lambda node: -node.log_confidence)[: self.row.gamma]
        width = self._limits.width if depth < self._limits.depth else 0
        self._level = [node for node in self._kept if node.depth == depth][:width]

    def feed(self) -> list[Node]:
        """Return the nodes to go on from, whose rows are fed next, each with its place."""
        taken = {node.way[-1] for node in self._kept if node.way}
        free = (place for place in range(1, self.row.gamma + 1) if place not in taken)
        for node, place in zip(self._level, free, strict=False):
            assert node.parent is not None
            node.way = (*node.parent.way, place)
        return self._level

    def draft(self) -> Draft:
        """Return the finished message."""
        places: dict[Node | None, int] = {node: place for place, node in enumerate(self._kept, start=1)}
        parents, tokens = main_branch_first(
            [places.get(node.parent, 0) for node in self._kept], [node.token_id for node in self._kept]
        )
        return Draft(self.row.request_id, self.row.committed_len, tokens, parents=parents)
