"""The bodies of `/v1/completions` and `/v1/chat/completions`, as clients send them.

Types and ranges are checked here, what depends on the model or on another field in `translate.py`. Unknown fields are
kept in `model_extra`, so that the app can warn about them once; `speculation`, our own, is strict.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from .tools import Tool, ToolCall, ToolChoice

ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast"]
Number = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
MAX_SEED = 2**63 - 1
MAX_BIASED_TOKENS = 1024


def _check_prompt(value: object) -> object:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        kinds = {type(item) for item in value}
        if kinds in ({str}, {int}) or (kinds == {list} and all(type(i) is int for item in value for i in item)):
            return value
    raise ValueError("must be a string, a list of strings, a list of token ids, or a list of lists of token ids")


def _check_content(value: object) -> object:
    if value is None or isinstance(value, str | list):
        return value
    raise ValueError("must be a string or a list of text parts")


def _check_stop(value: object) -> object:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return None
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops) or len(stops) > 4:
        raise ValueError("must be a non-empty string or a list of up to 4 of them")
    return stops


def _check_bias(value: object) -> object:
    """Return the map with whole numbers for keys: JSON has only strings for them."""
    if value is None:
        return None
    if not isinstance(value, dict) or not all(str(key).isascii() and str(key).isdecimal() for key in value):
        raise ValueError("must be a map from token ids to numbers")
    if len(value) > MAX_BIASED_TOKENS:
        raise ValueError(f"must have at most {MAX_BIASED_TOKENS} entries")
    if not all(type(bias) in (int, float) and -100 <= bias <= 100 for bias in value.values()):
        raise ValueError("must hold numbers from -100 to 100")
    return {int(key): float(bias) for key, bias in value.items()}


class TextPart(BaseModel):
    """A piece of a content; only text is understood."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["text"]
    text: str


class Speculation(BaseModel):
    """The caller's wishes for speculation; a policy may clamp them, and the answer says so."""

    model_config = ConfigDict(extra="forbid", strict=True)

    mode: Literal["auto", "on", "off"] = "auto"
    max_draft_tokens: Annotated[int, Field(ge=0, le=64)] | None = None
    proposer: Annotated[str, Field(min_length=1)] | None = None
    acceptance: Literal["coupled", "rejection", "block"] = "coupled"


class Prediction(BaseModel):
    """OpenAI's predicted output: the text that the caller expects, whole or in parts."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["content"]
    content: Annotated[str | list[TextPart], BeforeValidator(_check_content)]


class StreamOptions(BaseModel):
    """`continuous_usage_stats` is vLLM's: every chunk carries the usage so far."""

    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CommonRequest(BaseModel):
    """The fields both endpoints share. Those typed `Any` are refused, or accepted without effect, in `translate.py`."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())

    model: str
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_check_stop)] = None
    stop_token_ids: Annotated[list[int], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    n: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    service_tier: ServiceTier | None = None
    priority: int | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    speculation: Speculation | None = None

    prediction: Prediction | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(_check_bias)] = None
    response_format: Any = None

    user: Any = None
    metadata: Any = None
    store: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None


class CompletionRequest(CommonRequest):
    """Body of `POST /v1/completions`."""

    prompt: Annotated[str | list[str] | list[int] | list[list[int]], BeforeValidator(_check_prompt)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: Any = None
    best_of: int | None = None


class ChatMessage(BaseModel):
    """One turn of the conversation."""

    model_config = ConfigDict(extra="ignore", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | list[TextPart] | None, BeforeValidator(_check_content)] = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: Any = None


class ChatCompletionRequest(CommonRequest):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None

    reasoning_effort: Any = None
