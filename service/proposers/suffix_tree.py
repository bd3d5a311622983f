"""A suffix tree of a text that is made only where it is read: where did these last tokens occur, and what came then.

Contexts are read backwards, so that one more token of context is one step down. A node holds the places where its
context ended; they are handed on to its children only when somebody asks for a longer context, and not while they are
few enough to be compared with the text itself. Appending a token is therefore O(1) whatever the depth, and each place
is handed on at most once a level.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

FEW = 4
"""Places that are rather compared with the text than sorted into children."""
BREAK = -1
"""Stands between texts: no context reaches across it, and nothing follows before it."""


@dataclass(slots=True)
class Guess:
    """Tokens that may come next, and the sum of their estimated chances to be right: the accepted tokens to expect."""

    token_ids: tuple[int, ...] = ()
    score: float = 0.0


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

    def keep_newest(self, num_tokens: int) -> None:
        """Forget all but the last `num_tokens` tokens, and every node: those still read are made again."""
        del self.token_ids[: max(len(self.token_ids) - num_tokens, 0)]
        self._root = _Node()
        self.num_entries = 0

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


def chain(text: Sequence[int], ends: Sequence[int], limit: int, min_chance: float) -> Guess:
    """Return the likeliest continuation, token by token: each the commonest after the places that are left.

    A token's chance is the share of those places that it follows, times that of the tokens before it; the guess ends
    where it falls below `min_chance`. Of equally common tokens the one seen last is taken.
    """
    left: dict[tuple[int, ...], int] = {}
    for end in reversed(ends):
        continuation = tuple(text[end : end + limit])
        left[continuation] = left.get(continuation, 0) + 1
    drafted: list[int] = []
    chance, score = 1.0, 0.0
    for place in range(limit):
        counts: dict[int, int] = {}
        for continuation, times in left.items():
            if place < len(continuation) and continuation[place] != BREAK:
                counts[continuation[place]] = counts.get(continuation[place], 0) + times
        if not counts:
            break
        token = max(counts, key=counts.__getitem__)
        chance *= counts[token] / sum(left.values())
        if chance < min_chance:
            break
        drafted.append(token)
        score += chance
        left = {found: times for found, times in left.items() if place < len(found) and found[place] == token}
    return Guess(tuple(drafted), score)
