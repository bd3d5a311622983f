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
    `depth` levels at most."""

    width: int = 8
    depth: int = 8


@dataclass(slots=True, eq=False)
class _Node:
    """`row` numbers the nodes that were fed to the head, 0 the last committed token."""

    token_id: int
    parent: "_Node | None"
    log_confidence: float
    depth: int
    row: int = 0


class ConfidenceTree:
    """A draft being grown, level by level, to the `gamma` most confident of all its nodes.

    A node that is not among these now never will be, nor will what follows it: it is dropped at once, so that the tree
    is the paper's, with fewer rows. Every row takes a slot of those that the round holds for the draft, gamma + 1;
    where these run out, the least confident nodes of a level stay leaves.
    """

    def __init__(self, row: ProposeRow, limits: TreeLimits) -> None:
        self.row = row
        self._limits = limits
        self._kept: list[_Node] = []
        self._level = [_Node(-1, None, 0.0, 0)]
        self._first_row = 0
        self._row_parents: list[int] = []

    @property
    def complete(self) -> bool:
        """True when there is no node to go on from."""
        return not self._level

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of the nodes to go on from."""
        return tuple(node.token_id for node in self._level)

    @property
    def row_parents(self) -> tuple[int, ...]:
        """The tree of all rows fed, those to go on from among them (`ScoreRow.parents`)."""
        return tuple(self._row_parents)

    def grow(self, likeliest: Iterator[tuple[Sequence[int], Sequence[float]]]) -> None:
        """Add the nodes that follow the rows fed last and choose those to go on from.

        Each row takes its tokens and their log-probabilities from `likeliest`, the likeliest first.
        """
        born = [
            _Node(token_id, parent, parent.log_confidence + log_prob, parent.depth + 1)
            for parent in self._level
            for token_id, log_prob in zip(*next(likeliest), strict=True)
            if log_prob > -math.inf
        ]
        depth = self._level[0].depth + 1
        self._kept = sorted([*self._kept, *born], key=lambda node: -node.log_confidence)[: self.row.gamma]
        room = 0 if depth == self._limits.depth else self.row.gamma + 1 - len(self._row_parents)
        self._level = [node for node in self._kept if node.depth == depth][: min(room, self._limits.width)]

    def feed(self) -> list[int]:
        """Take the nodes to go on from as the next rows; return the place of each one's parent among the last ones."""
        parents = [node.parent.row for node in self._level if node.parent is not None]
        first = self._first_row
        self._first_row = len(self._row_parents) + 1
        self._row_parents.extend(parents)
        for row, node in enumerate(self._level, start=self._first_row):
            node.row = row
        return [parent - first for parent in parents]

    def draft(self) -> Draft:
        """Return the finished message."""
        places: dict[_Node | None, int] = {node: place for place, node in enumerate(self._kept, start=1)}
        parents, tokens = main_branch_first(
            [places.get(node.parent, 0) for node in self._kept], [node.token_id for node in self._kept]
        )
        return Draft(self.row.request_id, self.row.committed_len, tokens, parents=parents)
