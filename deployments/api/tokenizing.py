"""`POST /tokenize` and `/detokenize`, in vLLM's shapes: what a prompt or a conversation is to the model, and back."""

from functools import partial
from typing import Annotated, Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from specserve.service.errors import BadRequestError, ModelNotFoundError

from .backend import Backend
from .limits import check_chars, check_text, text_chars
from .reading import read
from .schemas import ChatCompletionRequest, ChatMessage
from .translate import render

MAX_DETOKENIZED = 131_072
"""So many tokens of a model with a shorter context hold the event loop up for some 20 ms."""


class TokenizeRequest(BaseModel):
    """Body of `POST /tokenize`: a `prompt`, or `messages` that the chat template makes a prompt of."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    """Body of `POST /detokenize`."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    tokens: list[int]


def add_tokenizing(app: FastAPI, backend: Backend) -> None:
    """Add both routes to `app`."""

    def check(model: str | None) -> None:
        if not backend.ready:
            raise HTTPException(503, "the model is not ready")
        if model is not None and model != backend.model_id:
            raise ModelNotFoundError(f"the model {model!r} is not served here", "model", "model_not_found")

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        check(body.model)
        check_text(body)
        chars = sum(text_chars(each) for each in (body.prompt, *(one.content for one in body.messages or ())))
        check_chars("messages" if body.prompt is None else "prompt", chars, backend.max_model_len)
        tokens = await read(chars, partial(_tokens, body, backend))
        strings = backend.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
        return {
            "count": len(tokens),
            "max_model_len": backend.max_model_len,
            "tokens": tokens,
            "token_strs": strings,
        }

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        check(body.model)
        most = max(backend.max_model_len, MAX_DETOKENIZED)
        if len(body.tokens) > most:
            raise BadRequestError(f"tokens must be at most {most}", "tokens")
        if not all(0 <= token_id < backend.vocab_size for token_id in body.tokens):
            raise BadRequestError(f"a token id is outside 0..{backend.vocab_size - 1}", "tokens")
        return {"prompt": str(backend.tokenizer.decode(body.tokens))}


def _tokens(body: TokenizeRequest, backend: Backend) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise BadRequestError("send a prompt or messages, and not both", "prompt")
    if body.prompt is not None:
        return list(backend.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False))
    if body.add_special_tokens:
        raise BadRequestError("messages get the special tokens of the chat template only", "add_special_tokens")
    chat = ChatCompletionRequest(model=backend.model_id, messages=body.messages or [])
    return list(render(chat, backend, body.add_generation_prompt))
