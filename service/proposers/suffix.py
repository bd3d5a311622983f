"""Suffix decoding: what followed the text's own ending before, in this request or in others of its scope. No model.

Source: arXiv 2411.04975; every match length makes a guess, and the one with the largest expected acceptance is drafted.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from ..messages import Draft, DraftBatch, ProposeBatch, ProposeRow
from ..ports import CommittedOutput
from .held import common_prefix, updated_tokens
from .suffix_tree import BREAK, Guess, SuffixTree, branches


@dataclass(frozen=True, slots=True)
class SuffixLimits:
    """A guess after a match of n tokens has at most `max_factor` * n.

    The `max_matches` longest matches guess, each from its `max_places` latest places, which bounds the time. The
    `shared_size` bounds what all scopes together remember, in tokens and places (about 50 bytes each). A `chain`
    follows the likeliest token alone, however many were seen.
    """

    max_depth: int = 24
    max_factor: float = 2.0
    min_chance: float = 0.1
    max_matches: int = 8
    max_places: int = 32
    shared_size: int = 400_000
    chain: bool = False


class SharedTexts:
    """The outputs of finished requests by scope; scopes never meet. Each has two trees at most, the older of which only
    fades away: nothing is ever made anew at once. Where room is short, the scope used longest ago is forgotten."""

    def __init__(self, limits: SuffixLimits) -> None:
        self._limits = limits
        self._trees: OrderedDict[str, list[SuffixTree]] = OrderedDict()

    @property
    def size(self) -> int:
        """Tokens and places held."""
        return sum(tree.size for trees in self._trees.values() for tree in trees)

    def learn(self, scope: str, token_ids: Sequence[int]) -> None:
        """Remember one output."""
        trees = self._trees.setdefault(scope, [])
        self._trees.move_to_end(scope)
        if not trees or trees[-1].size > self._limits.shared_size // 2:
            trees.append(SuffixTree(self._limits.max_depth))
        trees[-1].extend((*token_ids, BREAK))
        while self.size > self._limits.shared_size:
            oldest, others = next(iter(self._trees.items()))
            del others[0]
            if not others:
                del self._trees[oldest]

    def of(self, scope: str) -> Sequence[SuffixTree]:
        """Return what the scope remembers, the older tree first."""
        if scope in self._trees:
            self._trees.move_to_end(scope)
        return self._trees.get(scope, ())


class SuffixProposer:
    """Drafts from each request's own text and from what its scope's finished requests wrote."""

    name = "suffix"

    def __init__(self, limits: SuffixLimits | None = None) -> None:
        self._limits = limits if limits is not None else SuffixLimits()
        self._held: dict[str, SuffixTree] = {}
        self.shared = SharedTexts(self._limits)

    def observe(self, output: CommittedOutput) -> None:
        """Learn from a request that is over, whoever drafted for it."""
        if output.token_ids:
            self.shared.learn(output.scope, output.token_ids)

    def propose(self, batch: ProposeBatch) -> DraftBatch:
        """Return the best guess for each row, empty where nothing is known of its ending."""
        for request_id in batch.closed:
            self._held.pop(request_id, None)
        drafts = []
        for row in batch.rows:
            tree = self._tree(row)
            if tree is not None:
                guess = self._guess(tree, row)
                drafts.append(Draft(row.request_id, row.committed_len, guess.token_ids, parents=guess.parents))
        return DraftBatch(batch.round, tuple(drafts), len(self._held))

    def _guess(self, tree: SuffixTree, row: ProposeRow) -> Guess:
        context = tree.token_ids[-self._limits.max_depth :]
        best = Guess()
        for known in (tree, *reversed(self.shared.of(row.scope))):
            best = self._best(known, context, row.gamma, best)
        return best

    def _best(self, tree: SuffixTree, context: Sequence[int], gamma: int, best: Guess) -> Guess:
        """Return the guess with the largest score, of equal ones the longer match's, or `best` if none beats it."""
        limits, found = self._limits, Guess()
        for length, ends in list(tree.occurrences(context))[-limits.max_matches :]:
            limit = min(gamma, int(length * limits.max_factor + 1e-6))
            guess = branches(tree.token_ids, ends[-limits.max_places :], limit, limits.min_chance, limits.chain)
            if guess.score >= found.score:
                found = guess
        return found if found.score > best.score else best

    def _tree(self, row: ProposeRow) -> SuffixTree | None:
        tree = self._held.get(row.request_id)
        if tree is None:
            tree = self._held[row.request_id] = SuffixTree(self._limits.max_depth)
        if row.known_len == len(tree.token_ids) and row.known_len + len(row.new_token_ids) == row.committed_len:
            tree.extend(row.new_token_ids)
            return tree
        token_ids = updated_tokens(tree.token_ids, row)
        if token_ids is None:
            del self._held[row.request_id]
            return None
        if common_prefix(tree.token_ids, token_ids) < len(tree.token_ids):
            tree = self._held[row.request_id] = SuffixTree(self._limits.max_depth)
        tree.extend(token_ids[len(tree.token_ids) :])
        return tree
