"""What a proposer remembers of the requests it drafts for: their committed tokens, and nothing it could not lose."""

from collections.abc import Sequence

from ..messages import ProposeRow


def updated_tokens(held: list[int], row: ProposeRow) -> list[int] | None:
    """Return all committed tokens of `row` given those held, or None when some in between are missing."""
    if len(held) < row.known_len:
        return None
    token_ids = held[: row.known_len] + list(row.new_token_ids)
    return token_ids if len(token_ids) == row.committed_len else None


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many leading tokens, or pages, the two have in common."""
    count = 0
    for left, right in zip(first, second, strict=False):
        if left != right:
            break
        count += 1
    return count
