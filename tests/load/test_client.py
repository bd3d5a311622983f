"""The client against a fake server: what it asks, what it reads, and how it fits prompts to a model."""

from itertools import pairwise
from typing import Any

import pytest

from specserve.load.client import Ask, Client, speculation
from specserve.load.errors import LoadError
from specserve.load.prompts import WORKLOADS, Prompt, chosen, cut, cycled, prompts, sessions

PROMPTS = [Prompt("here", "chat", "hello"), Prompt("there", "completion", "def f("), Prompt("here", "chat", "bye")]


@pytest.fixture
def client(url: str) -> Client:
    return Client(url)


def test_modes_become_the_speculation_field() -> None:
    assert speculation("plain", "draft") == {"mode": "off"}
    assert speculation("fixed:4") == {"mode": "on", "max_draft_tokens": 4}
    assert speculation("adaptive", "draft") == {"mode": "auto", "proposer": "draft"}
    with pytest.raises(LoadError, match="sometimes"):
        speculation("sometimes")


def test_the_server_describes_itself(client: Client, fake: Any) -> None:
    assert client.facts().dtype == "bfloat16"
    fake.about = {"version": "1"}
    facts = client.facts()
    assert (facts.model, facts.max_model_len, facts.version, facts.dtype) == ("fake", 4096, "1", None)


@pytest.mark.parametrize("concurrency", [1, 2, 5])
def test_samples_come_back_in_the_prompts_order(client: Client, fake: Any, concurrency: int) -> None:
    done = client.run_pass("fake", PROMPTS, concurrency, Ask(speculation("fixed:3"), 8, 0.0))
    sample = done.samples[0]
    assert len(done.samples) == len(PROMPTS)
    assert (sample.num_tokens, sample.num_rounds, sample.num_drafted, sample.text) == (6, 2, 8, "xx")
    assert 0 < sample.arrivals_s[0] <= sample.arrivals_s[1] <= sample.end_s
    assert sorted(str(body.get("messages", body.get("prompt"))) for body in fake.bodies) == [
        "[{'role': 'user', 'content': 'bye'}]", "[{'role': 'user', 'content': 'hello'}]", "def f(",
    ]  # fmt: skip


def test_every_request_asks_for_the_same_work(client: Client, fake: Any) -> None:
    for _ in range(2):
        client.run_pass("fake", PROMPTS, 1, Ask(speculation("fixed:3"), 8, 0.5))
    sent = fake.bodies[0]
    assert (sent["temperature"], sent["max_tokens"], sent["ignore_eos"]) == (0.5, 8, True)
    assert sent["speculation"] == {"mode": "on", "max_draft_tokens": 3}
    assert [body["seed"] for body in fake.bodies] == [0, 1, 2] * 2
    assert len({body["cache_salt"] for body in fake.bodies}) == 6


def test_requests_of_a_session_follow_each_other_and_share_a_scope(client: Client, fake: Any) -> None:
    found = [Prompt("a", "chat", f"{name}{place}", name) for name in "ab" for place in range(2)]
    done = client.run_pass("fake", found, 4, Ask(speculation("plain"), 8, 0.0))
    assert len(done.samples) == 4
    sent = [body["messages"][0]["content"] for body in fake.bodies]
    assert [text for text in sent if text[0] == "a"] == ["a0", "a1"]
    assert [text for text in sent if text[0] == "b"] == ["b0", "b1"]
    salts = {text: body["cache_salt"] for text, body in zip(sent, fake.bodies, strict=True)}
    assert salts["a0"] == salts["a1"] != salts["b0"] == salts["b1"]


def test_only_the_proposer_of_predictions_is_told_one(client: Client, fake: Any) -> None:
    found = [Prompt("a", "chat", "a", None, "foreseen"), Prompt("b", "chat", "b")]
    for proposer in ("prediction", "suffix"):
        client.run_pass("fake", found, 1, Ask(speculation("fixed:3", proposer), 8, 0.0))
    told = [body.get("prediction") for body in fake.bodies]
    assert told == [{"type": "content", "content": "foreseen"}, None, None, None]


def test_a_server_says_what_may_draft(client: Client, fake: Any) -> None:
    assert client.proposers() == ()
    fake.proposers = ("draft", "suffix", "draft")
    assert client.proposers() == ("draft", "suffix")


def test_one_at_a_time_only_the_requests_own_seconds_count(client: Client) -> None:
    done = client.run_pass("fake", PROMPTS, 1, Ask(speculation("plain"), 8, 0.0))
    assert done.wall_s == sum(sample.end_s for sample in done.samples)


def test_a_refusal_is_one_sentence(client: Client) -> None:
    with pytest.raises(LoadError, match=r"answered 400 .*too many"):
        client.run_pass("fake", PROMPTS[1:2], 1, Ask(speculation("plain"), 2000, 0.0))


def test_a_broken_stream_is_no_sample(client: Client, fake: Any) -> None:
    fake.cut_streams = True
    with pytest.raises(LoadError):
        client.run_pass("fake", PROMPTS, 2, Ask(speculation("plain"), 8, 0.0))


def test_a_model_without_chat_template_gets_completions(client: Client, fake: Any) -> None:
    assert client.fitted(PROMPTS, client.facts(), 8) == tuple(PROMPTS)
    fake.has_chat = False
    found = client.fitted(PROMPTS, client.facts(), 8)
    assert {prompt.kind for prompt in found} == {"completion"}
    assert found[0].text.startswith("hello")


def test_long_prompts_are_cut_to_2000_tokens_or_to_the_context(client: Client, fake: Any) -> None:
    long = prompts("long_prompt")[:2]
    (first, _) = client.fitted(long, client.facts(), 128)
    assert 1900 <= len(first.text) / 4 <= 2000
    fake.max_model_len = 512
    (first, _) = client.fitted(long, client.facts(), 128)
    assert 330 <= len(first.text) / 4 <= 384
    assert first.text.endswith("\n")
    with pytest.raises(LoadError, match="no room"):
        client.fitted(long, client.facts(), 512)


def test_a_cut_prompt_without_lines_is_cut_anywhere() -> None:
    assert cut(Prompt("here", "completion", "x" * 9000), 1.0, 100).text == "x" * 95


@pytest.mark.parametrize("workload", WORKLOADS)
def test_each_workload_has_different_prompts(workload: Any) -> None:
    found = prompts(workload)
    kinds = {"copy_heavy": {"chat"}, "repeated": {"chat"}, "mixed": {"chat", "completion"}}
    assert len({prompt.text for prompt in found}) == len(found) == (32 if workload == "repeated" else 16)
    assert {prompt.kind for prompt in found} == kinds.get(workload, {"completion"})


def test_a_session_asks_for_small_edits_of_one_text() -> None:
    groups = sessions(prompts("repeated"))
    assert [len(group) for group in groups] == [4] * 8
    for group in groups:
        blocks = [prompt.prediction or "" for prompt in group]
        assert min(map(len, blocks)) > 500
        lines = [set(block.splitlines()) for block in blocks]
        assert all(0 < len(after - before) <= 5 for before, after in pairwise(lines))


def test_code_that_asks_to_be_copied_is_what_a_caller_predicts() -> None:
    (first, *_) = prompts("copy_heavy")
    assert first.prediction is not None
    assert first.prediction.startswith("def ")
    assert f"```python\n{first.prediction}\n```" in first.text
    assert prompts("code")[0].prediction is None


def test_whole_sessions_are_taken_until_there_are_enough_prompts_and_sessions() -> None:
    session = [Prompt("a", "chat", f"a{place}", "a") for place in range(3)]
    found = [*session, Prompt("b", "chat", "b")]
    texts = [[prompt.text for prompt in chosen(found, *wanted)] for wanted in ((1, 1), (4, 1), (1, 3))]
    assert texts == [["a0", "a1", "a2"], ["a0", "a1", "a2", "b"], ["a0", "a1", "a2", "b", "a0", "a1", "a2"]]
    assert [prompt.text for prompt in chosen(PROMPTS, 2, 1)] == ["hello", "def f("]


def test_prompts_begin_again_when_there_are_too_few() -> None:
    assert [prompt.text for prompt in cycled(PROMPTS, 5)] == ["hello", "def f(", "bye", "hello", "def f("]
