"""Names for what a KV page holds: a hash chain over the tokens from the beginning, under the tenant's salt.

A row of keys and values depends on every token before it, so a page is named by its tokens and its parent's name.
The names are 256-bit BLAKE2b digests: two different prefixes with one name would take 2**128 tries to find.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_BYTES = 32


class PrefixKeys:
    """The names of one request's full pages, made as its tokens are committed. Size: 32 bytes a page."""

    def __init__(self, salt: str, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._root = blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES, person=b"salt").digest()
        self._keys: list[bytes] = []

    def key(self, index: int, token_ids: Sequence[int]) -> bytes:
        """Return the name of page `index`, which `token_ids` fill; committed tokens never change, so it is kept."""
        size = self._page_tokens
        assert (index + 1) * size <= len(token_ids)
        while len(self._keys) <= index:
            start = len(self._keys) * size
            parent = self._keys[-1] if self._keys else self._root
            tokens = array("q", token_ids[start : start + size]).tobytes()
            self._keys.append(blake2b(parent + tokens, digest_size=DIGEST_BYTES, person=b"page").digest())
        return self._keys[index]
