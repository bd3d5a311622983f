"""From what a client sent to what the engine takes: pure, and the place where everything refusable is refused."""

import hashlib
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from specserve.service.errors import BadRequestError, ModelNotFoundError, PromptTooLongError
from specserve.service.messages import Sampling
from specserve.service.requests import GenerationRequest

from .backend import Backend
from .schemas import MAX_SEED, ChatCompletionRequest, CommonRequest, CompletionRequest, Speculation
from .structured import response_schema
from .tools import Toolbox, renders_tools, shown_calls, toolbox

DEFAULT_COMPLETION_TOKENS = 16
MAX_CHOICES = 128
GREEDY_BELOW = 1e-5
"""A temperature below it is 0, as in vLLM: logits divided by it would leave float32."""


def completion_requests(
    body: CompletionRequest, backend: Backend, response_id: str, random_seed: int
) -> list[GenerationRequest]:
    """Return one request a choice, `n` for each prompt in order. Raises BadRequestError naming the field."""
    _check_common(body, backend)
    _refuse("echo", bool(body.echo) and body.logprobs is not None, "does not go with logprobs: prompts are not scored")
    _refuse("suffix", bool(body.suffix), "is not supported")
    _refuse("best_of", body.best_of not in (None, body.n or 1), "other than n is not supported")
    sent = _split_prompts(body)
    if len(sent) * (body.n or 1) > MAX_CHOICES:
        raise BadRequestError(f"at most {MAX_CHOICES} choices a request; send fewer prompts", "prompt")
    prompts = [_encode(prompt, backend) for prompt in sent]
    return _requests(body, backend, response_id, random_seed, prompts, "prompt", body.logprobs)


def completion_echoes(body: CompletionRequest, backend: Backend) -> list[str]:
    """Return the text that each choice begins with, in the order of `completion_requests`; nothing without `echo`."""
    if not body.echo:
        return []
    prompts = _split_prompts(body)
    texts = [
        prompt if isinstance(prompt, str) else str(backend.tokenizer.decode(prompt, skip_special_tokens=True))
        for prompt in prompts
    ]
    return [text for text in texts for _ in range(body.n or 1)]


def chat_requests(
    body: ChatCompletionRequest, backend: Backend, response_id: str, random_seed: int
) -> list[GenerationRequest]:
    """Return one request a choice, the conversation rendered by the model's chat template. Raises BadRequestError."""
    _check_common(body, backend)
    _refuse(
        "response_format",
        bool(body.tools) and response_schema(body.response_format) is not None,
        "does not go with tools",
    )
    _refuse("functions", bool(body.functions), "is not supported yet")
    _refuse("function_call", body.function_call not in (None, "none", "auto"), "is not supported yet")
    _refuse("modalities", body.modalities not in (None, ["text"]), "other than text is not supported")
    _refuse("audio", body.audio is not None, "is not supported")
    _refuse("top_logprobs", body.top_logprobs is not None and not body.logprobs, "needs logprobs: true")
    prompt = render(body, backend)
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _requests(body, backend, response_id, random_seed, [prompt], "messages", num_logprobs)


def _check_common(body: CommonRequest, backend: Backend) -> None:
    if body.model != backend.model_id:
        raise ModelNotFoundError(f"the model {body.model!r} is not served here", "model", "model_not_found")
    _refuse("stream_options", body.stream_options is not None and not body.stream, "needs stream: true")
    for param, token_ids in (("stop_token_ids", body.stop_token_ids), ("logit_bias", body.logit_bias)):
        in_range = all(0 <= token_id < backend.vocab_size for token_id in token_ids or ())
        _refuse(param, not in_range, f"must name tokens within 0..{backend.vocab_size - 1}")


def _refuse(param: str, refused: bool, why: str) -> None:
    if refused:
        raise BadRequestError(f"{param} {why}", param)


def _split_prompts(body: CompletionRequest) -> list[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    prompts: list[str | list[int]] = []
    single: list[int] = []
    for item in prompt:
        if isinstance(item, int):
            single.append(item)
        else:
            prompts.append(item)
    return prompts or [single]


def _encode(prompt: str | list[int], backend: Backend) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return tuple(backend.tokenizer.encode(prompt))
    if not all(0 <= token_id < backend.vocab_size for token_id in prompt):
        raise BadRequestError(f"a token id is outside 0..{backend.vocab_size - 1}", "prompt")
    return tuple(prompt)


def render(body: ChatCompletionRequest, backend: Backend, add_generation_prompt: bool = True) -> tuple[int, ...]:
    """Return the tokens that the model's chat template makes of a conversation. Raises BadRequestError."""
    if backend.tokenizer.chat_template is None:
        raise BadRequestError("this model has no chat template; use /v1/completions", "messages")
    box = asked_tools(body, backend)
    messages: list[dict[str, Any]] = []
    for index, message in enumerate(body.messages):
        if message.function_call:
            raise BadRequestError("function_call is not supported; use tool_calls", f"messages.{index}.function_call")
        if message.content is None and not message.tool_calls:
            raise BadRequestError("a message needs content", f"messages.{index}.content")
        if (message.role == "tool" or message.tool_calls) and not renders_tools(backend.tokenizer.chat_template):
            field = "role" if message.role == "tool" else "tool_calls"
            raise BadRequestError("this model's chat template does not render tools", f"messages.{index}.{field}")
        content = message.content or ""
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        role = "system" if message.role == "developer" else message.role
        turn: dict[str, Any] = {"role": role, "content": content}
        if message.tool_calls:
            turn["tool_calls"] = shown_calls(message.tool_calls, f"messages.{index}.tool_calls")
        if message.tool_call_id is not None:
            turn["tool_call_id"] = message.tool_call_id
        messages.append(turn)
    try:
        text = backend.tokenizer.apply_chat_template(
            messages,
            tools=None if box is None else [tool.model_dump(exclude_none=True) for tool in box.tools],
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )
    except TemplateError as error:
        raise BadRequestError(f"the model's chat template refuses these messages: {error}", "messages") from error
    return tuple(backend.tokenizer.encode(str(text), add_special_tokens=False))


def asked_tools(body: ChatCompletionRequest, backend: Backend) -> Toolbox | None:
    """Return the tools that the model is shown. Raises BadRequestError."""
    return toolbox(body.tools, body.tool_choice, body.parallel_tool_calls, backend.tokenizer.chat_template)


def _requests(
    body: CommonRequest,
    backend: Backend,
    response_id: str,
    random_seed: int,
    prompts: Sequence[tuple[int, ...]],
    param: str,
    num_logprobs: int | None,
) -> list[GenerationRequest]:
    limits = [_max_tokens(body, backend, len(prompt), param) for prompt in prompts]
    speculation = body.speculation or Speculation()
    num_choices = body.n or 1
    seeds = _seeds(body, random_seed, len(prompts), num_choices)
    prediction = _prediction(body, backend)
    sampling = [_sampling(body, speculation, seed, backend.vocab_size) for seed in seeds]
    return [
        GenerationRequest(
            request_id=response_id if len(prompts) * num_choices == 1 else f"{response_id}-{p * num_choices + c}",
            prompt_token_ids=prompt,
            sampling=sampling[p * num_choices + c],
            max_tokens=limits[p],
            min_tokens=body.min_tokens or 0,
            stop=tuple(body.stop or ()),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
            num_logprobs=None if num_logprobs is None else min(num_logprobs, backend.vocab_size),
            mode=speculation.mode,
            max_draft_tokens=speculation.max_draft_tokens,
            proposer=speculation.proposer,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            prediction_token_ids=prediction,
        )
        for p, prompt in enumerate(prompts)
        for c in range(num_choices)
    ]


def _prediction(body: CommonRequest, backend: Backend) -> tuple[int, ...] | None:
    """Return the tokens of the predicted output, as it would be written in the middle of a text."""
    if body.prediction is None:
        return None
    content = body.prediction.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    token_ids = tuple(backend.tokenizer.encode(text, add_special_tokens=False))
    if len(token_ids) > backend.max_model_len:
        raise BadRequestError(
            f"this model's context is {backend.max_model_len} tokens; the prediction has {len(token_ids)}", "prediction"
        )
    return token_ids


def _max_tokens(body: CommonRequest, backend: Backend, prompt_len: int, param: str) -> int:
    """Return the output limit of one prompt. Raises BadRequestError when prompt and output cannot fit."""
    if prompt_len == 0:
        raise BadRequestError("the prompt is empty", param)
    room = backend.max_model_len - prompt_len
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if room < (asked or 1):
        raise PromptTooLongError(
            f"this model's context is {backend.max_model_len} tokens; the prompt has {prompt_len} and "
            f"{asked or 'at least 1'} more are asked for",
            param,
            "context_length_exceeded",
        )
    default = min(room, DEFAULT_COMPLETION_TOKENS) if isinstance(body, CompletionRequest) else room
    limit = default if asked is None else asked
    _refuse("min_tokens", (body.min_tokens or 0) > limit, f"must not exceed the {limit} tokens of output allowed")
    return limit


def _sampling(body: CommonRequest, speculation: Speculation, seed: int, vocab_size: int) -> Sampling:
    temperature = 1.0 if body.temperature is None else body.temperature
    return Sampling(
        greedy=temperature < GREEDY_BELOW,
        temperature=1.0 if temperature < GREEDY_BELOW else temperature,
        top_k=min(body.top_k, vocab_size) if body.top_k is not None and body.top_k > 0 else None,
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=0.0 if body.min_p is None else body.min_p,
        seed=seed,
        acceptance=speculation.acceptance,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=tuple(sorted((body.logit_bias or {}).items())),
    )


def _seeds(body: CommonRequest, random_seed: int, num_prompts: int, num_choices: int) -> list[int]:
    """Return the seed of every choice. The caller's own seed means the same for each prompt, whichever come with it;
    without one all choices differ, also those of a prompt that is sent twice."""
    if body.seed is None:
        return [choice_seed(random_seed, choice) for choice in range(num_prompts * num_choices)]
    return [choice_seed(body.seed & MAX_SEED, choice) for _ in range(num_prompts) for choice in range(num_choices)]


def choice_seed(seed: int, choice: int) -> int:
    """Return the 63-bit seed of one choice: the caller's own for the first, hashed from it for the others."""
    if choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) & MAX_SEED
