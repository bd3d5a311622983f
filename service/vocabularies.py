"""Two vocabularies side by side: which tokens they share, and the target's text in the draft model's tokens.

Source: token-level intersection (TLI), arXiv 2502.05202. A token is the bytes it stands for, however its vocabulary
spells a space or a byte.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

import torch
from transformers import PreTrainedTokenizerFast

from .errors import ModelUnsupportedError

LOG = logging.getLogger(__name__)
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""How SentencePiece vocabularies spell a space."""


class SharedVocabulary:
    """Translates between a target's token ids and those of a draft model with another tokenizer."""

    def __init__(
        self,
        target: PreTrainedTokenizerFast,
        draft: PreTrainedTokenizerFast,
        target_size: int,
        draft_size: int,
    ) -> None:
        self._draft = draft
        self._target_size = target_size
        self._target_bytes = token_bytes(target, target_size)
        self._draft_bytes = token_bytes(draft, draft_size)
        by_bytes: dict[bytes, int] = {}
        for token_id, data in self._draft_bytes.items():
            by_bytes.setdefault(data, token_id)
        self._byte_ids = {data[0]: token_id for data, token_id in by_bytes.items() if len(data) == 1}
        self._special = _shared_special(target, draft, target_size, draft_size)
        found: dict[int, int] = {}
        for target_id, data in self._target_bytes.items():
            draft_id = by_bytes.pop(data, None)
            if draft_id is not None:
                found[target_id] = draft_id
        if not found:
            raise ModelUnsupportedError("the draft model's vocabulary has no token in common with the target's")
        self._draft_id: Mapping[int, int] = found | self._special
        pairs = sorted(self._draft_id.items())
        self._target_ids = torch.tensor([target_id for target_id, _ in pairs])
        self._draft_ids = torch.tensor([draft_id for _, draft_id in pairs])
        first = list(draft("")["input_ids"])
        self._first = first if len(first) == 1 else []
        LOG.info("the draft model shares %d of the target's %d tokens", len(pairs), target_size)

    @property
    def num_shared(self) -> int:
        """How many tokens both know."""
        return len(self._target_ids)

    def logits(self, draft_logits: torch.Tensor) -> torch.Tensor:
        """Return logits over the target's tokens, -inf where the draft model has none; softmax renormalises them."""
        full = draft_logits.new_full((len(draft_logits), self._target_size), -torch.inf)
        device = draft_logits.device
        full[:, self._target_ids.to(device)] = draft_logits[:, self._draft_ids.to(device)]
        return full

    def drafted(self, target_ids: Iterable[int]) -> list[int]:
        """Return the draft model's ids of tokens that it drafted itself."""
        return [self._draft_id[token] for token in target_ids]

    def beginning(self, target_ids: Sequence[int]) -> list[int]:
        """Return a request's text as the draft model would tokenize it, special tokens each for itself."""
        found = self._translated(target_ids, self._special)
        return found if found[:1] == self._first else self._first + found

    def following(self, target_ids: Sequence[int]) -> list[int]:
        """Return what comes after a context: shared tokens each for itself, the text of the others tokenized anew."""
        return self._translated(target_ids, self._draft_id)

    def _translated(self, target_ids: Sequence[int], one_by_one: Mapping[int, int]) -> list[int]:
        found: list[int] = []
        pending = b""
        for token in target_ids:
            if token in one_by_one:
                found += [*self._encoded(pending), one_by_one[token]]
                pending = b""
            else:
                pending += self._target_bytes.get(token, b"")
        return found + self._encoded(pending)

    def _encoded(self, data: bytes) -> list[int]:
        """Return the draft model's tokens of some text; a part of a character becomes its single-byte tokens."""
        if not data:
            return []
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return [self._byte_ids[byte] for byte in data if byte in self._byte_ids]
        found = list(self._draft.encode(text, add_special_tokens=False))
        made = b"".join(self._draft_bytes.get(token, b"") for token in found)
        added_space = made == b" " + data and self._draft_bytes.get(found[0]) == b" "
        return found[1:] if added_space else found


def shared_vocabulary(
    target: PreTrainedTokenizerFast, draft: PreTrainedTokenizerFast, target_size: int, draft_size: int
) -> SharedVocabulary | None:
    """Return the translation between two models' tokens; None when their ids mean the same, but for padding.

    Raises: ModelUnsupportedError when they share no token.
    """
    theirs, ours = (_pieces(one, size) for one, size in ((target, target_size), (draft, draft_size)))
    common = theirs.keys() & ours.keys()
    if len(common) == min(len(theirs), len(ours)) and all(theirs[token] == ours[token] for token in common):
        return None
    return SharedVocabulary(target, draft, target_size, draft_size)


def token_bytes(tokenizer: PreTrainedTokenizerFast, size: int) -> dict[int, bytes]:
    """Return the bytes of every token that stands for text; those of byte fallback come last."""
    byte_level = not any(SPACE in piece for piece in tokenizer.tokenize(" "))
    special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    added = set(tokenizer.added_tokens_decoder)
    found: dict[int, bytes] = {}
    single: dict[int, bytes] = {}
    for token_id, piece in sorted(_pieces(tokenizer, size).items()):
        if token_id in special or not piece:
            continue
        if byte_level:
            alphabet = byte_alphabet()
            spelled = token_id not in added and all(char in alphabet for char in piece)
            found[token_id] = bytes(alphabet[char] for char in piece) if spelled else piece.encode()
        elif len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            single[token_id] = bytes([int(piece[3:5], 16)])
        else:
            found[token_id] = piece.replace(SPACE, " ").encode()
    return found | single


@cache
def byte_alphabet() -> Mapping[str, int]:
    """Return which byte each character of a byte-level vocabulary stands for. Source: GPT-2's `bytes_to_unicode`."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _pieces(tokenizer: PreTrainedTokenizerFast, size: int) -> dict[int, str]:
    return {token_id: piece for piece, token_id in tokenizer.get_vocab().items() if token_id < size}


def _shared_special(
    target: PreTrainedTokenizerFast, draft: PreTrainedTokenizerFast, target_size: int, draft_size: int
) -> dict[int, int]:
    """Return the special tokens that mean the same: what begins and what ends a text, and those of the same name."""
    known = {
        token.content: token_id
        for token_id, token in draft.added_tokens_decoder.items()
        if token.special and token_id < draft_size
    }
    found: dict[int, int] = {}
    for theirs, ours in ((target.eos_token_id, draft.eos_token_id), (target.bos_token_id, draft.bos_token_id)):
        if theirs is not None and ours is not None and theirs < target_size and ours < draft_size:
            found[theirs] = ours
    for token_id, token in target.added_tokens_decoder.items():
        named = known.get(token.content)
        if token.special and token_id < target_size and named is not None and named not in found.values():
            found.setdefault(token_id, named)
    return found
