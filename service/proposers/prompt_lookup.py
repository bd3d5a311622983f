"""Prompt lookup: the continuation of the most recent earlier occurrence of the text's own ending. No model.

Source: Saxena 2023 (prompt lookup decoding); longest n-gram first, latest occurrence.
"""

from ..messages import Draft, DraftBatch, ProposeBatch, ProposeRow
from .held import common_prefix, updated_tokens

NGram = tuple[int, ...]


class NGramIndex:
    """The tokens of one text and where each n-gram of theirs was last continued. Cost: O(1) per appended token."""

    def __init__(self, min_tokens: int, max_tokens: int) -> None:
        self._sizes = range(max_tokens, min_tokens - 1, -1)
        self._continuations: dict[NGram, int] = {}
        self.token_ids: list[int] = []

    def extend(self, token_ids: list[int]) -> None:
        """Append `token_ids`; an n-gram becomes findable once the token after it is known."""
        for token_id in token_ids:
            end = len(self.token_ids)
            for size in self._sizes:
                if size <= end:
                    self._continuations[tuple(self.token_ids[end - size :])] = end
            self.token_ids.append(token_id)

    def lookup(self, gamma: int) -> tuple[int, ...]:
        """Return up to `gamma` tokens that followed the longest known n-gram the text ends with; may be empty.

        A continuation that reaches the end of the text goes on with itself, so repetition is followed for ever.
        """
        end = len(self.token_ids)
        for size in self._sizes:
            start = self._continuations.get(tuple(self.token_ids[end - size :])) if size <= end else None
            if start is not None:
                period = end - start
                return tuple(self.token_ids[start + offset % period] for offset in range(gamma))
        return ()


class PromptLookupProposer:
    """Drafts from each request's own prompt and output."""

    name = "prompt_lookup"

    def __init__(self, min_tokens: int = 2, max_tokens: int = 4) -> None:
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens
        self._held: dict[str, NGramIndex] = {}

    def propose(self, batch: ProposeBatch) -> DraftBatch:
        """Return the continuation found for each row, empty when its ending was never seen before."""
        for request_id in batch.closed:
            self._held.pop(request_id, None)
        drafts = []
        for row in batch.rows:
            index = self._index(row)
            if index is not None:
                drafts.append(Draft(row.request_id, row.committed_len, index.lookup(row.gamma)))
        return DraftBatch(batch.round, tuple(drafts), len(self._held))

    def _index(self, row: ProposeRow) -> NGramIndex | None:
        index = self._held.setdefault(row.request_id, NGramIndex(self._min_tokens, self._max_tokens))
        if row.known_len == len(index.token_ids) and row.known_len + len(row.new_token_ids) == row.committed_len:
            index.extend(list(row.new_token_ids))
            return index
        token_ids = updated_tokens(index.token_ids, row)
        if token_ids is None:
            del self._held[row.request_id]
            return None
        if common_prefix(index.token_ids, token_ids) < len(index.token_ids):
            index = self._held[row.request_id] = NGramIndex(self._min_tokens, self._max_tokens)
        index.extend(token_ids[len(index.token_ids) :])
        return index
