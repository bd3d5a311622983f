"""A suffix tree of a text that is made only where it is read: where did these last tokens occur, and what came then.

Contexts are read backwards, so that one more token of context is one step down. A node holds the places where its
context ended; they are handed on to its children only when somebody asks for a longer context, and not while they are
few enough to be compared with the text itself. Appending a token is therefore O(1) whatever the depth, and each place
is handed on at most once a level.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from ..trees import is_chain, main_branch_first

FEW = 4
"""Places that are rather compared with the text than sorted into children."""
BREAK = -1
"""Stands between texts: no context reaches across it, and nothing follows before it."""


_Candidate = tuple[float, tuple[int, int], int, int, int, dict[tuple[int, ...], int]]


@dataclass(slots=True)
class Guess:
    """Tokens that may come next, a chain or a tree (`trees.py`), and the sum of their estimated chances to be right: so
    many accepted tokens are expected."""

    token_ids: tuple[int, ...] = ()
    score: float = 0.0
    parents: tuple[int, ...] | None = None


@dataclass(slots=True)
class _Node:
    """A context: `ends` are the places after it, in order, the first `num_sorted` of them known to `children`."""

    ends: list[int] = field(default_factory=list)
    num_sorted: int = 0
    children: "dict[int, _Node]" = field(default_factory=dict)


class SuffixTree:
    """One growing text, or several with breaks between them."""

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._root = _Node()
        self.token_ids: list[int] = []
        self.num_entries = 0

    @property
    def size(self) -> int:
        """Tokens and places held: what memory goes with. At most (depth + 1) a token, mostly 2 or 3."""
        return len(self.token_ids) + self.num_entries

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append `token_ids` to the text."""
        self.token_ids.extend(token_ids)

    def occurrences(self, context: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        """Yield (length, places after it) of ever longer endings of `context` that occur in the text.

        Endings with the same places are one, the longest. A place may be the end of the text itself.
        """
        longest = min(self._max_depth, len(context))
        known: tuple[int, list[int]] | None = None
        for depth, ends in self._descend(context, longest):
            if known is not None and len(ends) < len(known[1]):
                yield known
            known = (depth, ends)
            if ends[0] == len(self.token_ids):
                return
        if known is not None:
            yield known

    def _descend(self, context: Sequence[int], longest: int) -> Iterator[tuple[int, list[int]]]:
        node, depth, text = self._root, 0, self.token_ids
        while depth < longest and (depth == 0 or len(node.ends) > FEW):
            self._sort(node, depth)
            child = node.children.get(context[-1 - depth])
            if child is None:
                return
            node, depth = child, depth + 1
            yield depth, node.ends
        ends = node.ends
        while depth < longest:
            token = context[-1 - depth]
            depth += 1
            ends = [end for end in ends if end >= depth and text[end - depth] == token]
            if not ends:
                return
            yield depth, ends

    def _sort(self, node: _Node, depth: int) -> None:
        """Hand what is new in `node` on to its children. The root has no list: its places are all there are."""
        text, children = self.token_ids, node.children
        new = range(node.num_sorted + 1, len(text) + 1) if depth == 0 else node.ends[node.num_sorted :]
        for end in new:
            before = text[end - depth - 1] if end > depth else BREAK
            if before != BREAK:
                child = children.get(before)
                if child is None:
                    child = children[before] = _Node()
                child.ends.append(end)
                self.num_entries += 1
        node.num_sorted += len(new)


def branches(text: Sequence[int], ends: Sequence[int], limit: int, min_chance: float, chain: bool = False) -> Guess:
    """Return the `limit` likeliest tokens after `ends`, as a tree: those that the places were followed by.

    A token's chance is the share of its parent's places that it follows, times the parent's; none below `min_chance` is
    taken. Of equally likely ones the one seen last comes first. A `chain` goes on from its last token alone.
    """
    left: dict[tuple[int, ...], int] = {}
    for end in reversed(ends):
        continuation = tuple(text[end : end + limit])
        left[continuation] = left.get(continuation, 0) + 1
    parents: list[int] = []
    drafted: list[int] = []
    score = 0.0
    open_ends: list[_Candidate] = []
    _open(open_ends, 0, 0, 1.0, left, min_chance)
    while open_ends and len(drafted) < limit:
        negative, _, node, depth, token, places = heappop(open_ends)
        if chain:
            open_ends.clear()
        parents.append(node)
        drafted.append(token)
        score -= negative
        _open(open_ends, len(drafted), depth, -negative, places, min_chance)
    if is_chain(parents):
        return Guess(tuple(drafted), score)
    shape, tokens = main_branch_first(parents, drafted)
    return Guess(tokens, score, shape)


def _open(
    open_ends: "list[_Candidate]",
    node: int,
    depth: int,
    chance: float,
    places: dict[tuple[int, ...], int],
    min_chance: float,
) -> None:
    """Add what follows `node`, whose `places` go on with these continuations from `depth` on."""
    followers: dict[int, dict[tuple[int, ...], int]] = {}
    for continuation, times in places.items():
        if depth < len(continuation) and continuation[depth] != BREAK:
            followers.setdefault(continuation[depth], {})[continuation] = times
    total = sum(places.values())
    for order, (token, some) in enumerate(followers.items()):
        share = chance * sum(some.values()) / total
        if share >= min_chance:
            heappush(open_ends, (-share, (node, order), node, depth + 1, token, some))
