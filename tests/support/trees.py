"""Proposers that draft trees knowing the answer: what tells them apart is where they put it among wrong guesses.

And EAGLE-2's tree, grown slowly.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from specserve.service.messages import Draft, DraftBatch, ProposeBatch
from specserve.service.trees import paths


@dataclass
class Growing:
    """A tree of at most `room` tokens."""

    room: int
    vocab_size: int
    draw: random.Random
    right: Sequence[int]
    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)

    def add(self, parent: int, token: int) -> int:
        """Return the new node, or `parent` itself when there is no room left."""
        if len(self.parents) >= self.room:
            return parent
        self.token_ids.append(token)
        self.parents.append(parent)
        return len(self.parents)

    def wrong(self, parent: int) -> int:
        """Add a token that is no sibling's, and not the right one either where `parent` is the root."""
        taken = {token for token, other in zip(self.token_ids, self.parents, strict=True) if other == parent}
        taken.update(self.right[:1] if parent == 0 else self.right)
        free = [token for token in range(min(self.vocab_size, len(taken) + 9)) if token not in taken]
        return self.add(parent, self.draw.choice(free))


Shape = Callable[[Growing], None]
TokenPath = tuple[int, ...]


def papers_tree(
    log_probs: Callable[[TokenPath], torch.Tensor], width: int, depth: int, num_nodes: int
) -> set[TokenPath]:
    """The ways to the nodes of EAGLE-2's tree, straight from the paper: expand the `width` most confident nodes of each
    level, then keep the `num_nodes` most confident of all. `log_probs` gives those of what follows a way, [vocab]."""
    confidence: dict[TokenPath, float] = {}
    level: dict[TokenPath, float] = {(): 0.0}
    for _ in range(depth):
        born: dict[TokenPath, float] = {}
        for way, reached in level.items():
            own = log_probs(way)
            for token in own.topk(width).indices.tolist():
                born[*way, token] = reached + float(own[token])
        confidence |= born
        level = dict(sorted(born.items(), key=lambda item: -item[1])[:width])
    return {way for way, _ in sorted(confidence.items(), key=lambda item: -item[1])[:num_nodes]}


def token_paths(draft: Draft) -> set[TokenPath]:
    """The ways to all nodes of a draft, as tokens."""
    assert draft.parents is not None
    return {tuple(draft.token_ids[node - 1] for node in path[1:]) for path in paths(draft.parents)[1:]}


def in_place(tree: Growing) -> None:
    """The right branch first, whole: nothing has to be moved."""
    node = 0
    for token in tree.right[: tree.room // 2 + 1]:
        node = tree.add(node, token)
    while len(tree.parents) < tree.room:
        tree.wrong(tree.draw.randint(0, len(tree.parents)))


def right_first(tree: Growing) -> None:
    """At every depth the right token before two wrong ones."""
    node = 0
    for token in tree.right:
        found = tree.add(node, token)
        tree.wrong(node)
        tree.wrong(node)
        node = found


def right_last(tree: Growing) -> None:
    """At every depth the right token after two wrong ones, of which the first goes on."""
    node = 0
    for token in tree.right:
        tree.wrong(tree.wrong(node))
        tree.wrong(node)
        node = tree.add(node, token)


def all_wrong(tree: Growing) -> None:
    tree.wrong(0)
    while len(tree.parents) < tree.room:
        tree.wrong(tree.draw.randint(0, len(tree.parents)))


def wide(tree: Growing) -> None:
    """Only children of the root, the right one in the middle."""
    for place in range(tree.room):
        if place == tree.room // 2:
            tree.add(0, tree.right[0])
        else:
            tree.wrong(0)


def deep(tree: Growing) -> None:
    """One wrong token, then the right chain down to the last."""
    tree.wrong(0)
    node = 0
    for token in tree.right:
        node = tree.add(node, token)


def tangled(tree: Growing) -> None:
    """Any node after any other, every second one right if it can be."""
    depth_of = {0: 0}
    while len(tree.parents) < tree.room:
        parent = tree.draw.randint(0, len(tree.parents))
        depth = depth_of.get(parent, len(tree.right))
        siblings = [token for token, other in zip(tree.token_ids, tree.parents, strict=True) if other == parent]
        if depth < len(tree.right) and tree.right[depth] not in siblings and tree.draw.random() < 0.5:
            depth_of[tree.add(parent, tree.right[depth])] = depth + 1
        else:
            tree.wrong(parent)


def mixed(tree: Growing) -> None:
    """Any of the others."""
    tree.draw.choice([in_place, right_first, right_last, all_wrong, wide, deep, tangled])(tree)


SHAPES: dict[str, Shape] = {
    shape.__name__: shape for shape in (in_place, right_first, right_last, all_wrong, wide, deep, tangled, mixed)
}


class TreeProposer:
    """Drafts trees of one shape. `texts` holds every request's tokens, prompt and plain answer, by its id."""

    def __init__(self, shape: str, texts: Mapping[str, Sequence[int]], vocab_size: int) -> None:
        self.name = f"tree_{shape}"
        self._shape = SHAPES[shape]
        self._texts = texts
        self._vocab_size = vocab_size
        self._draw = random.Random(shape)

    def propose(self, batch: ProposeBatch) -> DraftBatch:
        drafts = []
        for row in batch.rows:
            right = list(self._texts[row.request_id][row.committed_len :]) or [0]
            tree = Growing(row.gamma, self._vocab_size, self._draw, right)
            self._shape(tree)
            drafts.append(Draft(row.request_id, row.committed_len, tuple(tree.token_ids), parents=tuple(tree.parents)))
        return DraftBatch(batch.round, tuple(drafts), 0)
