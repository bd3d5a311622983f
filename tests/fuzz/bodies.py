"""Random bodies: those that must be served, and those that are wrong in one field or several."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

from specserve.deployments.api.schemas import ChatCompletionRequest, CompletionRequest

MODEL = "specserve-embedded"
PROPOSERS = ("prompt_lookup", "draft", "suffix")
Body = dict[str, Any]
_TEXTS = (
    "def add(a, b):",
    "class Point:\n    def __init__(self, x):\n        self.x = x\n",
    "import os\n",
    "\n",
    " ",
    "x",
    "été 中文 🙂 \u202e",
    "\x00",
    "a b " * 40,
    "for i in range(10):\n    print(i)\n" * 20,
    "<|endoftext|>",
    "\ufeff",
    "e\u0301" * 10,
    "\U0001f469\u200d\U0001f469\u200d\U0001f467",
)
_STOPS = ("\n", " ", "e", "self", "def ", ":\n", "é", "🙂", "\x00", "return", "(", "\n\n", "    ")


_FORMATS: tuple[Body, ...] = (
    {"type": "text"},
    {"type": "json_object"},
    {
        "type": "json_schema",
        "json_schema": {"name": "p", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    },
    {"type": "json_schema", "json_schema": {"name": "e", "schema": {"enum": ["x", "é", None]}}},
)


class Raw(str):
    """JSON as it is to be sent: what `json.dumps` would never write."""


def encoded(value: object) -> bytes:
    """Return `value` as JSON with every `Raw` in its place; halves of surrogate pairs and NaN are written."""
    raws: list[str] = []

    def marked(node: object) -> object:
        if isinstance(node, Raw):
            raws.append(str(node))
            return f"@raw{len(raws) - 1}@"
        if isinstance(node, dict):
            return {key: marked(each) for key, each in node.items()}
        return [marked(each) for each in node] if isinstance(node, list) else node

    text = json.dumps(marked(value))
    for place, raw in enumerate(raws):
        text = text.replace(f'"@raw{place}@"', raw)
    return text.encode()


def _deep(depth: int) -> Raw:
    return Raw("[" * depth + "]" * depth)


NASTY: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    3.5,
    -0.0,
    1e-320,
    1e308,
    -1e308,
    10**19,
    -(10**30),
    2**63,
    2**64,
    10**400,
    float("nan"),
    float("inf"),
    Raw("1e999"),
    Raw("-1e999"),
    Raw("1" * 5000),
    Raw("0.1e-9999"),
    "",
    " ",
    "x",
    "\ud800",
    "a\udfff",
    "\x00",
    "é" * 300,
    "x" * 70_000,
    "null",
    "NaN",
    "1",
    [],
    {},
    [[]],
    [None],
    [{}],
    [0],
    [-1],
    [4096],
    [2**40],
    ["\ud800"],
    ["x"] * 5,
    [""],
    {"": 1},
    {"x": None},
    {"\ud800": "\ud800"},
    {"\ud800": 1},
    {"1": float("nan")},
    {"1": 5},
    {"99999": 1},
    {"-1": 1},
    {"1e3": 1},
    {"²": 1},
    {"1" * 5000: 1},
    {"type": "text"},
    {"type": "content"},
    {"type": "content", "content": "\ud800"},
    {"type": "content", "content": [{"type": "text"}]},
    {"type": "json_schema"},
    {"type": "json_object"},
    {"mode": "on", "proposer": "\ud800"},
    {"mode": "x"},
    {"max_draft_tokens": 65},
    {"include_usage": "yes"},
    {"include_usage": True, "\ud800": 1},
    "auto",
    "none",
    "text",
    _deep(40),
    _deep(900),
    _deep(985),
    _deep(100_000),
    Raw('{"a":' * 400 + "1" + "}" * 400),
    "9" * 400,
    [{"role": "user", "content": "x"}],
    [{"role": "tool", "content": "x"}],
    [{"role": "user"}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    [{"role": "user", "content": [{"type": "text", "text": "\udbff"}]}],
    [{"role": "user", "content": "x", "\ud800": "\ud800"}],
)
_SCHEMAS: tuple[Any, ...] = (
    {},
    True,
    {"$ref": "#"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    {"$ref": "http://a.example/x"},
    {"type": "string", "pattern": "(a+)+$"},
    {"type": "string", "pattern": "["},
    {"type": "string", "maxLength": 10**9},
    {"type": "array", "minItems": 10**6, "items": {"type": "integer"}},
    {"enum": ["\ud800"]},
    {"enum": [str(place) for place in range(5000)]},
    {"type": "object", "properties": {"\ud800": {}, "": {}, "é": {"const": float("nan")}}},
    {"type": "number", "minimum": 10**400},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"anyOf": []},
    {"not": {}},
    Raw('{"items":' * 300 + "{}" + "}" * 300),
    *NASTY,
)


def schema_wish(rng: Random) -> Body:
    """Return a `response_format` whose schema is seldom right."""
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": rng.choice(_SCHEMAS)}}


_NAMES = {True: sorted(ChatCompletionRequest.model_fields), False: sorted(CompletionRequest.model_fields)}
_STRANGE = ("\ud800", "", "x" * 1000, "__class__", "model_config", "self", "extra_body", "best_of", "\x00", "é")


def valid_body(rng: Random, chat: bool) -> Body:
    """Return a body that must be served unless the service has too much to do."""
    most = rng.choice((1, 2, 7, 16, 33, 64, 96))
    body: Body = {"model": MODEL, rng.choice(("max_tokens", "max_completion_tokens")): most}
    body |= _conversation(rng) if chat else _prompt(rng)
    maybe: dict[str, Callable[[], Any]] = {
        "temperature": lambda: rng.choice((0, 0, 1e-9, 0.3, 1, 1.7, 2)),
        "top_p": lambda: rng.choice((1e-9, 0.1, 0.9, 1)),
        "top_k": lambda: rng.choice((-1, 0, 1, 5, 4096, 10**6, 2**31, 2**63, 10**30)),
        "min_p": lambda: rng.choice((0, 0.05, 1)),
        "seed": lambda: rng.choice((0, 7, -1, 2**63 - 1, -(2**63))),
        "stop": lambda: rng.choice(
            (rng.choice(_STOPS), rng.sample(_STOPS, rng.randint(0, 4)), [rng.choice(_TEXTS)[:200]])
        ),
        "stop_token_ids": lambda: [rng.randrange(4096) for _ in range(rng.randrange(6))],
        "ignore_eos": lambda: rng.random() < 0.5,
        "n": lambda: rng.choice((1, 1, 2, 3, 16)),
        "min_tokens": lambda: rng.randint(0, most),
        "presence_penalty": lambda: rng.uniform(-2, 2),
        "frequency_penalty": lambda: rng.uniform(-2, 2),
        "repetition_penalty": lambda: rng.choice((0.01, 0.7, 1.3, 100)),
        "logit_bias": lambda: {
            str(rng.randrange(4096)): rng.uniform(-100, 100) for _ in range(rng.choice((1, 5, 300)))
        },
        "service_tier": lambda: rng.choice(("auto", "default", "flex", "scale", "priority", "fast")),
        "priority": lambda: rng.choice((0, -5, 5, 2**40, -(10**30))),
        "cache_salt": lambda: rng.choice(("a", "b", "中", "x" * 5000)),
        "user": lambda: rng.choice(("me", 5, None, {"a": [1]})),
        "metadata": lambda: {"a": "b"},
        "response_format": lambda: rng.choice(_FORMATS),
        "an_unknown_field": lambda: rng.choice((1, "x", {"y": []})),
    }
    body |= {name: make() for name, make in maybe.items() if rng.random() < 0.22}
    if rng.random() < 0.5:
        body["stream"] = True
        if rng.random() < 0.6:
            body["stream_options"] = {"include_usage": rng.random() < 0.7, "continuous_usage_stats": rng.random() < 0.3}
    _add_logprobs(rng, body, chat)
    _add_speculation(rng, body)
    return body


def _prompt(rng: Random) -> Body:
    texts = [rng.choice(_TEXTS) + rng.choice(_TEXTS) for _ in range(3)]
    ids = [rng.randrange(4096) for _ in range(rng.choice((1, 2, 15, 16, 17, 200)))]
    prompt = rng.choice((texts[0], texts[0], texts, ids, [ids, ids[:1]], [texts[0], texts[0]]))
    return {"prompt": prompt} | ({"echo": True} if rng.random() < 0.15 else {})


def _conversation(rng: Random) -> Body:
    contents = (lambda: rng.choice(_TEXTS), lambda: [{"type": "text", "text": rng.choice(_TEXTS)}] * 2)
    turns = [{"role": rng.choice(("system", "developer")), "content": "Be brief."}] if rng.random() < 0.3 else []
    for _ in range(rng.choice((0, 0, 1, 3))):
        turns += [{"role": "user", "content": rng.choice(_TEXTS)}, {"role": "assistant", "content": "ok"}]
    return {"messages": [*turns, {"role": "user", "content": rng.choice(contents)()}]}


def _add_logprobs(rng: Random, body: Body, chat: bool) -> None:
    if rng.random() > 0.25 or body.get("echo"):
        return
    if chat:
        body |= {"logprobs": True, "top_logprobs": rng.choice((0, 1, 20))}
    else:
        body["logprobs"] = rng.choice((0, 1, 20))


def _add_speculation(rng: Random, body: Body) -> None:
    if rng.random() < 0.3:
        content = rng.choice(_TEXTS) * rng.choice((0, 1, 3))
        body["prediction"] = {"type": "content", "content": rng.choice((content, [{"type": "text", "text": content}]))}
    if rng.random() < 0.75:
        wish: Body = {"mode": rng.choice(("auto", "on", "on", "off"))}
        if rng.random() < 0.7:
            wish["max_draft_tokens"] = rng.choice((0, 1, 2, 5, 8, 33, 64))
        if rng.random() < 0.6:
            wish["proposer"] = rng.choice(PROPOSERS)
        if (
            body.get("prediction", {}).get("content") not in (None, "", [{"type": "text", "text": ""}])
            and rng.random() < 0.5
        ):
            wish["proposer"] = "prediction"
        wish["acceptance"] = rng.choice(("coupled", "rejection", "block"))
        body["speculation"] = wish


def spoilt_body(rng: Random, chat: bool) -> Body:
    """Return a body with wrong values in one to three places, though some may happen to be right."""
    body = valid_body(rng, chat)
    for _ in range(rng.choice((1, 1, 2, 3))):
        where = rng.random()
        if where < 0.1:
            body.pop(rng.choice(sorted(body)), None)
        elif where < 0.15:
            body["response_format"] = schema_wish(rng)
        elif where < 0.2 and chat:
            function = {"name": rng.choice(("x", "", "\ud800")), "parameters": rng.choice(_SCHEMAS)}
            body["tools"] = [{"type": "function", "function": function}]
            body["tool_choice"] = rng.choice(("required", "auto", {"type": "function", "function": {"name": "x"}}))
        elif where < 0.3:
            body[rng.choice(_STRANGE)] = rng.choice(NASTY)
        elif where < 0.4:
            inner = body.setdefault(rng.choice(("speculation", "stream_options", "prediction", "metadata")), {})
            if isinstance(inner, dict):
                inner[rng.choice((*_STRANGE, "mode", "proposer", "content", "type", "include_usage"))] = rng.choice(
                    NASTY
                )
        else:
            body[rng.choice(_NAMES[chat])] = rng.choice(NASTY)
    if not body.keys() & {"max_tokens", "max_completion_tokens"}:
        body["max_tokens"] = 8  # or a whole context is written, which takes longer than a visitor waits
    return body


def tokenizing_body(rng: Random) -> tuple[str, Body]:
    """Return a path and a body for it, right or wrong."""
    if rng.random() < 0.5:
        body: Body = {"tokens": rng.choice(([0, 5, 4095], [], [-1], [4096], [2**70], rng.choice(NASTY), [0] * 20_000))}
        path = "/detokenize"
    else:
        body = {rng.choice(("prompt", "messages")): rng.choice((*_TEXTS, *NASTY))}
        path = "/tokenize"
    if rng.random() < 0.3:
        name = rng.choice(("model", "add_special_tokens", "add_generation_prompt", "return_token_strs", *_STRANGE))
        body[name] = rng.choice((True, False, *NASTY))
    return path, body
