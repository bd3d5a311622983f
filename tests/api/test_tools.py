"""Tools: shown by templates that can, demanded by a grammar, read back out of the text, whole or as it streams."""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from support.grammars import byte_tokenizer

from specserve.deployments.api.tools import CallReader
from specserve.service.grammar import Grammars

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool.function.name }};{% endfor %}Say <tool_call>.{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ c.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/c"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"c": {"enum": ["Ulm", "Bonn"]}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
TICK = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'


@pytest.fixture(autouse=True)
def tooled(backend: Any) -> Any:
    backend.tokenizer.chat_template = TEMPLATE
    backend.max_model_len = 1000
    backend.grammars = Grammars(byte_tokenizer(), 256, ())
    return backend


def chat(**fields: Any) -> dict[str, Any]:
    asked = {"model": "org/tiny", "messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER, CLOCK]}
    return {**asked, "max_tokens": 300, **fields}


def prompt(backend: Any) -> str:
    return str(backend.tokenizer.decode(backend.submitted[-1].prompt_token_ids))


def admits(backend: Any, text: str) -> bool:
    matcher = backend.grammars.matcher(backend.submitted[-1].grammar)
    return all(matcher.advance(token) for token in byte_tokenizer().encode(text))


async def post(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post("/v1/chat/completions", json=chat(**fields))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("choice", "calls", "others"),
    [
        (
            "required",
            [CALL, TICK, f"{CALL}\n{TICK}"],
            ["Hello", CALL.replace("Ulm", "Rome"), CALL.replace("weather", "x")],
        ),
        ({"type": "function", "function": {"name": "weather"}}, [CALL], [TICK, f"{CALL}\n{TICK}"]),
    ],
    ids=["required", "named"],
)
async def test_a_demanded_call_is_the_only_thing_that_may_come(
    client: httpx.AsyncClient, backend: Any, choice: Any, calls: list[str], others: list[str]
) -> None:
    assert (await post(client, tool_choice=choice)).status_code == 200
    assert [admits(backend, text) for text in calls] == [True] * len(calls)
    assert [admits(backend, text) for text in others] == [False] * len(others)


@pytest.mark.asyncio
async def test_required_without_parallel_calls_admits_one(client: httpx.AsyncClient, backend: Any) -> None:
    await post(client, tool_choice="required", parallel_tool_calls=False)
    assert admits(backend, TICK)
    assert not admits(backend, f"{TICK}\n{TICK}")


@pytest.mark.asyncio
async def test_auto_shows_the_tools_and_none_does_not(client: httpx.AsyncClient, backend: Any) -> None:
    for choice in (None, "auto"):
        await post(client, tool_choice=choice)
        assert prompt(backend).startswith("weather;clock;Say <tool_call>.")
        assert backend.submitted[-1].grammar is None
    await post(client, tool_choice="none")
    assert prompt(backend) == "user:hi"


@pytest.mark.asyncio
async def test_history_with_calls_and_results_is_rendered(client: httpx.AsyncClient, backend: Any) -> None:
    called = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
    ]
    assert (await post(client, messages=turns, tool_choice="none")).status_code == 200
    said = prompt(backend)
    assert '"name": "weather"' in said
    assert '"arguments": {"city": "Ulm"}' in said
    assert "tool:sun" in said


def answering(backend: Any, script: SimpleNamespace, pieces: list[str], reason: str = "stop") -> None:
    def steps(request: Any) -> list[Any]:
        return [*(script.step(request, piece) for piece in pieces), script.end(request, 9, reason=reason)]

    backend.script = steps


@pytest.mark.asyncio
async def test_a_call_in_the_text_becomes_tool_calls(
    client: httpx.AsyncClient, backend: Any, script: SimpleNamespace
) -> None:
    answering(backend, script, ["Let me see.\n", CALL, "\n", TICK])
    choice = (await post(client)).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    first, second = choice["message"]["tool_calls"]
    assert first["type"] == "function"
    assert first["function"]["name"] == "weather"
    assert json.loads(first["function"]["arguments"]) == {"city": "Ulm"}
    assert second["function"]["name"] == "clock"
    assert first["id"] != second["id"]


@pytest.mark.asyncio
async def test_a_stream_never_shows_half_a_call(
    client: httpx.AsyncClient, backend: Any, script: SimpleNamespace
) -> None:
    answering(backend, script, list(f"a < b {CALL}\n{TICK}"))
    answer = await post(client, stream=True)
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas).rstrip() == "a < b"
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [(call["index"], call["function"]["name"]) for call in calls] == [(0, "weather"), (1, "clock")]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.asyncio
async def test_an_answer_cut_inside_a_call_is_content_and_ends_as_length(
    client: httpx.AsyncClient, backend: Any, script: SimpleNamespace
) -> None:
    answering(backend, script, [CALL[:-20]], "length")
    choice = (await post(client)).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"]
    assert choice["message"]["content"] == CALL[:-20]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("change", "fields", "param"),
    [
        (None, {"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        (None, {"tools": [], "tool_choice": "required"}, "tool_choice"),
        (None, {"response_format": {"type": "json_object"}}, "response_format"),
        ("{{ messages[0].content }}", {}, "tools"),
        (
            "{{ messages[0].content }}",
            {"tools": None, "messages": [{"role": "tool", "content": "x"}]},
            "messages.0.role",
        ),
    ],
)
async def test_what_cannot_be_done_is_a_400(
    client: httpx.AsyncClient, backend: Any, change: str | None, fields: dict[str, Any], param: str
) -> None:
    if change is not None:
        backend.tokenizer.chat_template = change
    answer = await post(client, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert not backend.submitted


@pytest.mark.asyncio
async def test_parameters_that_cannot_be_followed_are_refused(client: httpx.AsyncClient, backend: Any) -> None:
    bad = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}
    answer = await post(client, tools=[bad], tool_choice="required")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools"
    assert "'not'" in answer.json()["error"]["message"]


@pytest.mark.parametrize("text", ["<tool_call>no</tool_call>", "<tool_call>[]</tool_call>", "<tool_cal", "a <b"])
@pytest.mark.parametrize("cut", [lambda text: [text], list], ids=["whole", "letters"])
def test_what_is_no_call_stays_content(text: str, cut: Callable[[str], list[str]]) -> None:
    reader = CallReader()
    shown = "".join(reader.read(piece, False)[0] for piece in cut(text)) + reader.read("", True)[0]
    assert shown == text
    assert not reader.calls
