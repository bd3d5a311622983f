"""What a constrained request may say next: grammars compiled for one tokenizer, and one matcher for each output."""

import copy
import threading
from collections import OrderedDict
from collections.abc import Sequence

import llguidance
import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerFast

from .errors import BadRequestError
from .messages import Constraint
from .trees import paths

Mask = npt.NDArray[np.bool_]
MAX_COMPILED = 64
MAX_MATCHERS = 512


class Matcher:
    """The place of one output in its grammar.

    The library sees nothing of EOS: any of the `eos_token_ids` is allowed exactly where the grammar may end, and after
    it nothing but EOS is.
    """

    def __init__(
        self,
        inner: llguidance.LLMatcher,
        trie: llguidance.LLTokenizer,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self._inner = inner
        self._vocab_size = vocab_size
        self._eos = list(eos_token_ids)
        self._tokens: list[int] = []
        self._num_eos = 0
        self._masked = False
        self._bits = np.zeros((trie.vocab_size + 31) // 32, dtype=np.int32)
        self._never = [token_id for token_id in trie.eos_tokens if token_id < vocab_size]

    @property
    def complete(self) -> bool:
        """True when no text can follow: after EOS, or where the grammar has no way on and may end."""
        return self._num_eos > 0 or (self._inner.is_stopped() and self._inner.is_accepting())

    @property
    def broken(self) -> bool:
        """True when the library met one of its limits; it then takes nothing more."""
        return bool(self._inner.is_error())

    def advance(self, token_id: int) -> bool:
        """Take one token and return True; return False, and stay, when the grammar forbids it."""
        if token_id in self._eos:
            if not (self._num_eos or self._inner.is_accepting()):
                return False
            self._num_eos += 1
        elif self.complete or self._inner.validate_tokens([token_id]) != 1 or not self._inner.consume_token(token_id):
            return False
        self._tokens.append(token_id)
        return True

    def rollback(self, num_tokens: int) -> None:
        """Take the last `num_tokens` tokens back."""
        assert num_tokens <= len(self._tokens)
        num_eos = min(num_tokens, self._num_eos)
        self._num_eos -= num_eos
        if num_tokens > num_eos:
            self._inner.rollback(num_tokens - num_eos)
            if self._masked:  # the library keeps its last mask by the output's length in bytes, whatever was taken back
                self._inner.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        del self._tokens[len(self._tokens) - num_tokens :]

    def align(self, token_ids: Sequence[int]) -> None:
        """Go to where `token_ids` lead, as far as they may, from wherever this is.

        Cost: that of the tokens after the common prefix.
        """
        common = 0
        for ours, theirs in zip(self._tokens, token_ids, strict=False):
            if ours != theirs:
                break
            common += 1
        self.rollback(len(self._tokens) - common)
        for token_id in token_ids[common:]:
            if not self.advance(token_id):
                break

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many of `token_ids` may follow one another from here."""
        count = self._advanced(token_ids)
        self.rollback(count)
        return count

    def _advanced(self, token_ids: Sequence[int]) -> int:
        """Advance as far as `token_ids` are allowed, and return how many were."""
        count = 0
        while count < len(token_ids) and self.advance(token_ids[count]):
            count += 1
        return count

    def masks(self, draft_token_ids: Sequence[int], parents: Sequence[int] | None = None) -> Mask:
        """Return which tokens may come here and after each token of a draft, a chain or a tree: [gamma + 1, vocab].

        After a forbidden draft token everything may come: no output reaches that place.
        """
        masks = np.ones((len(draft_token_ids) + 1, self._vocab_size), dtype=np.bool_)
        masks[0] = self.mask()
        if parents is not None:
            for node, path in enumerate(paths(parents)):
                count = self._advanced([draft_token_ids[one - 1] for one in path[1:]])
                if count == len(path) - 1:
                    masks[node] = self.mask()
                self.rollback(count)
            return masks
        count = 0
        while count < len(draft_token_ids) and self.advance(draft_token_ids[count]):
            count += 1
            masks[count] = self.mask()
        self.rollback(count)
        return masks

    def mask(self) -> Mask:
        """Return which tokens may come next, [vocab].

        Where the grammar has no way on and may not end, this is EOS too, and everything for a model without EOS: some
        token must be drawn, and `advance` then refuses it.
        """
        allowed = np.zeros(self._vocab_size, dtype=np.bool_)
        if not self.complete and not self._inner.is_error():
            self._masked = True
            self._inner.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
            bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: self._vocab_size]
            allowed = bits.astype(np.bool_)
            allowed[self._never] = False
            allowed[self._eos] = self._inner.is_accepting()
        if not allowed.any():
            allowed[self._eos if self._eos else slice(None)] = True
        return allowed


class Grammars:
    """Grammars compiled for one tokenizer, the latest `MAX_COMPILED` of them; any thread may ask."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self.tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self._trie: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Read the vocabulary, if nobody asked for it before. Cost: 30 ms for 4,096 tokens, 3.6 s for 262,144."""
        with self._lock:
            if self._trie is None:
                self._trie = _trie(self.tokenizer, self._vocab_size)

    def matcher(self, source: str, param: str = "response_format") -> Matcher:
        """Return a matcher at the start of the grammar `source`. Raises: BadRequestError naming `param` for a bad one.

        Cost: that of a compilation when the grammar is not known, else that of a copy.
        """
        self.prepare()
        with self._lock:
            known = self._compiled.get(source)
        if known is None:
            known = self._compile(source, param)
        with self._lock:
            self._compiled[source] = known
            self._compiled.move_to_end(source)
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            own = known.deep_copy()
        assert self._trie is not None
        return Matcher(own, self._trie, self._vocab_size, self._eos_token_ids)

    def _compile(self, source: str, param: str) -> llguidance.LLMatcher:
        assert self._trie is not None
        compiled = llguidance.LLMatcher(self._trie, source, log_level=0)
        if compiled.is_error():
            reason = compiled.get_error().strip().partition("\n")[0]  # what follows is for the library's developers
            raise BadRequestError(f"{param}: this cannot be followed: {reason}", param)
        return compiled


class Matchers:
    """The matchers of requests being verified, the latest `MAX_MATCHERS`. A cache: any of them can be rebuilt."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._held: OrderedDict[tuple[str, str], Matcher] = OrderedDict()

    def at(self, request_id: str, constraint: Constraint) -> Matcher:
        """Return the request's matcher, standing after its committed output."""
        key = (request_id, constraint.grammar)
        matcher = self._held.pop(key, None)
        if matcher is None or matcher.broken:
            matcher = self._grammars.matcher(constraint.grammar)
        matcher.align(constraint.output_token_ids)
        self._held[key] = matcher
        while len(self._held) > MAX_MATCHERS:
            self._held.popitem(last=False)
        return matcher


def _trie(tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> llguidance.LLTokenizer:
    """Return the library's form of a vocabulary. The library wants an EOS: it gets a token nobody else knows."""
    backend = copy.copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    backend.add_special_tokens(["<|end of grammar|>"])
    eos_token_id = backend.token_to_id("<|end of grammar|>")
    assert eos_token_id is not None
    return llguidance.LLTokenizer(backend.to_str(), n_vocab=max(vocab_size, eos_token_id + 1), eos_token=eos_token_id)
