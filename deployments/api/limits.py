"""What one request may be at most; whatever is larger is refused with the name of the field."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from specserve.service.errors import BadRequestError

from .schemas import ChatCompletionRequest, CommonRequest

MAX_STOP_CHARS = 256
MAX_METADATA_PAIRS = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512
MAX_CHARS_PER_TOKEN = 128
NO_TEXT = "has half of a surrogate pair"


class RequestLimits(BaseModel):
    """Those limits that an operator may set."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_body_bytes: int = Field(4 * 2**20, ge=1024, description="Bytes of a request's body.")
    max_prompt_tokens: int | None = Field(None, ge=1, description="Tokens of a prompt; None is what fits the model.")
    max_choices: int = Field(16, ge=1, le=128, description="The largest `n`.")
    max_messages: int = Field(1024, ge=1, description="Messages of a conversation.")
    max_waiting: int = Field(256, ge=0, description="Requests that may wait for a place; more are refused with 503.")
    flex_max_waiting: int = Field(8, ge=0, description="While more requests wait, flex is refused with 429.")


def check_body(body: CommonRequest, limits: RequestLimits, max_model_len: int) -> None:
    """Raise BadRequestError naming the field that is over a limit or no text, before anything is tokenized."""
    check_text(body)
    _check("n", (body.n or 1) <= limits.max_choices, f"must be at most {limits.max_choices}")
    for stop in body.stop or ():
        _check("stop", len(stop) <= MAX_STOP_CHARS, f"must have at most {MAX_STOP_CHARS} characters each")
    _check_metadata(body.metadata)
    most = limits.max_prompt_tokens or max_model_len
    if isinstance(body, ChatCompletionRequest):
        fits = len(body.messages) <= limits.max_messages
        _check("messages", fits, f"must be at most {limits.max_messages}")
        check_chars("messages", _said(body.messages), most)
        check_chars("tools", _said(body.tools), most)
    else:
        check_chars("prompt", max((len(each) for each in _texts(getattr(body, "prompt", None))), default=0), most)
    check_chars("prediction", _predicted_chars(body), max_model_len)


def check_chars(param: str, chars: int, most: int) -> None:
    """Raise BadRequestError naming a field whose text is too long for `most` tokens of any tokenizer."""
    _check(param, chars <= most * MAX_CHARS_PER_TOKEN, f"has too many characters for {most} tokens")


def num_chars(body: CommonRequest) -> int:
    """Return how many characters there are to tokenize."""
    return _asked_chars(body) + _predicted_chars(body)


def _asked_chars(body: CommonRequest) -> int:
    if isinstance(body, ChatCompletionRequest):
        return _said(body.messages) + _said(body.tools)
    return sum(len(each) for each in _texts(getattr(body, "prompt", None)))


def _said(value: Any) -> int:
    return sum(len(text) for text in _strings(value))


def _predicted_chars(body: CommonRequest) -> int:
    return 0 if body.prediction is None else text_chars(body.prediction.content)


def check_text(body: BaseModel) -> None:
    """Raise BadRequestError naming a field with a string that no tokenizer takes."""
    for name, value in body:
        _check(name, is_text(value), NO_TEXT)


def is_text(value: Any) -> bool:
    """Return whether every string in `value` can be encoded."""
    return all(_is_unicode(text) for text in _strings(value))


def _check(param: str, fits: bool, why: str) -> None:
    if not fits:
        raise BadRequestError(f"{param} {why}", param)


def _strings(value: Any) -> Iterator[str]:
    """Yield every string in a field, however deep; JSON that is nested too deep to be parsed does not come here."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            left += [*value, *value.values()]
        elif isinstance(value, BaseModel):
            left += [each for _, each in value]


def _is_unicode(text: str) -> bool:
    """Return whether `text` can be encoded: JSON may hold halves of surrogate pairs, and no tokenizer takes them."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def _check_metadata(metadata: Any) -> None:
    if metadata is None:
        return
    fits = isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    _check("metadata", fits, "must be an object of strings")
    fits = len(metadata) <= MAX_METADATA_PAIRS
    _check("metadata", fits, f"must have at most {MAX_METADATA_PAIRS} pairs")
    fits = all(len(k) <= MAX_METADATA_KEY_CHARS and len(v) <= MAX_METADATA_VALUE_CHARS for k, v in metadata.items())
    _check("metadata", fits, f"is limited to {MAX_METADATA_KEY_CHARS} characters a key and 512 a value")


def text_chars(content: Any) -> int:
    """Return how many characters a content has, which may be in parts."""
    return len(content) if isinstance(content, str) else sum(len(part.text) for part in content or ())


def _texts(prompt: Any) -> list[str]:
    if isinstance(prompt, str):
        return [prompt]
    return [each for each in prompt or () if isinstance(each, str)]
