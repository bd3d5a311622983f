"""Log-probabilities of emitted tokens in OpenAI's two shapes."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerFast

from specserve.service.messages import TokenLogprob
from specserve.service.vocabularies import byte_alphabet

_LOWEST = -9999.0


@dataclass(frozen=True, slots=True)
class Scored:
    """Tokens with their log-probabilities; both have the same length."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()

    def __add__(self, other: "Scored") -> "Scored":
        return Scored(self.token_ids + other.token_ids, self.logprobs + other.logprobs)


def chat_logprobs(scored: Scored, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Return the chat shape: one entry a token, with its bytes and its best others."""
    content = []
    for token_id, logprob in zip(scored.token_ids, scored.logprobs, strict=True):
        entry = _entry(token_id, logprob.logprob, tokenizer)
        content.append({**entry, "top_logprobs": [_entry(other, value, tokenizer) for other, value in logprob.top]})
    return {"content": content, "refusal": None}


def completion_logprobs(scored: Scored, tokenizer: PreTrainedTokenizerFast, offset: int) -> tuple[dict[str, Any], int]:
    """Return the completions shape and the text offset after it; `offset` counts characters of token strings."""
    tokens, values, tops, offsets = [], [], [], []
    for token_id, logprob in zip(scored.token_ids, scored.logprobs, strict=True):
        token = token_text(token_id, tokenizer)
        top: dict[str, float] = {}
        for other, value in (*logprob.top, (token_id, logprob.logprob)):
            top.setdefault(token_text(other, tokenizer), _finite(value))
        tokens.append(token)
        values.append(_finite(logprob.logprob))
        tops.append(top)
        offsets.append(offset)
        offset += len(token)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}, offset


def token_text(token_id: int, tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a token's own text; a part of a character reads as U+FFFD."""
    return str(tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _entry(token_id: int, value: float, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    text = token_text(token_id, tokenizer)
    return {"token": text, "logprob": _finite(value), "bytes": _token_bytes(token_id, text, tokenizer)}


def _token_bytes(token_id: int, text: str, tokenizer: PreTrainedTokenizerFast) -> list[int] | None:
    """Return the token's UTF-8 bytes; those of a byte-level token that holds part of a character; else None."""
    if "\N{REPLACEMENT CHARACTER}" not in text:
        return list(text.encode())
    piece = tokenizer.convert_ids_to_tokens(token_id)
    alphabet = byte_alphabet()
    if isinstance(piece, str) and all(char in alphabet for char in piece):
        return [alphabet[char] for char in piece]
    return None


def _finite(value: float) -> float:
    """Return `value`, or OpenAI's -9999.0 for what JSON cannot say."""
    return max(_LOWEST, value)
