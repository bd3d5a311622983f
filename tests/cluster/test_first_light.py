"""The whole path on real Ray: separate actors answer, speculate exactly, and survive the death of any of them."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from support.identity import MAX_TOKENS, SEED, TEMPERATURE, TWENTY, WAYS
from support.scrape import Samples
from support.service import Service

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]

PROMPTS = [
    "def parse(self, line):\n    ",
    "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self, path):\n",
    "<|user|>\nRepeat this function:\n```python\ndef add(first, second):\n    total = first + second\n"
    "    return total\n```<|end|>\n<|assistant|>\n",
    "for name, value in sorted(items):\n",
]
PLAIN = {"mode": "off"}


def body(prompt: str, speculation: dict[str, Any], **changes: Any) -> dict[str, Any]:
    base = {"model": "specserve-embedded", "prompt": prompt, "max_tokens": 48, "temperature": 0, "ignore_eos": True}
    return {**base, "speculation": speculation, **changes}


def complete(service: Service, sent: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{service.url}/v1/completions", json=sent, timeout=120)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in answer.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def test_a_stream_shows_text_and_ends_with_metrics(service: Service) -> None:
    sent = body(PROMPTS[2], {"mode": "on", "max_draft_tokens": 4, "proposer": "prompt_lookup"}, stream=True)
    with httpx.stream("POST", f"{service.url}/v1/completions", json=sent, timeout=120) as answer:
        received = list(events(answer))
    assert "".join(event["choices"][0]["text"] for event in received if event["choices"])
    metrics = received[-1]["metrics"]
    counted = metrics["speculative_decoding"]
    assert sum(counted["acceptance_histogram"]) == counted["num_spec_steps"] > 0
    assert counted["num_accepted_draft_tokens"] <= counted["num_draft_tokens"]
    assert metrics["speculation"]["proposer"] == "prompt_lookup"
    assert metrics["speculation"]["policy_version"] >= 1


SAMPLINGS = {"greedy": {"temperature": 0}, "seeded": {"temperature": TEMPERATURE, "seed": SEED}}


def all_at_once(service: Service, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda one: complete(service, one), bodies))


def tokens(answers: list[dict[str, Any]]) -> list[Any]:
    return [(done["choices"][0]["text"], done["choices"][0]["logprobs"]["tokens"]) for done in answers]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_twenty_prompts_get_plain_decodings_text_whatever_is_drafted(
    service: Service, sampling: dict[str, Any]
) -> None:
    def all_of(speculation: dict[str, Any]) -> list[dict[str, Any]]:
        sent = [body(prompt, speculation, max_tokens=MAX_TOKENS, logprobs=0, **sampling) for prompt in TWENTY]
        return all_at_once(service, sent)

    plain = all_of(PLAIN)
    assert all(done["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0 for done in plain)
    for proposer in ("prompt_lookup", "draft"):
        num_accepted = 0
        for way in WAYS:
            drafted = all_of(way.field(proposer))
            assert tokens(drafted) == tokens(plain), (proposer, str(way))
            counted = [done["metrics"]["speculative_decoding"] for done in drafted]
            num_accepted += sum(one["num_accepted_draft_tokens"] for one in counted)
        assert num_accepted > 0


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_a_batch_of_all_proposers_gets_plain_decodings_text(service: Service, sampling: dict[str, Any]) -> None:
    """Wherever they live: in the engine, the pool or beside the target. The second time prompts are found cached."""
    sent = [body(prompt, PLAIN, max_tokens=MAX_TOKENS, logprobs=0, **sampling) for prompt in TWENTY]
    plain = all_at_once(service, sent)
    drafted: set[str] = set()
    for first in range(2):
        for place, (one, done) in enumerate(zip(sent, plain, strict=True)):
            name = service.settings.proposers[(first + place) % len(service.settings.proposers)]
            one["speculation"] = {"mode": "on", "max_draft_tokens": 1 + place % 6, "proposer": name}
            one["prediction"] = {"type": "content", "content": done["choices"][0]["text"][4:]}
        answers = all_at_once(service, sent)
        assert tokens(answers) == tokens(plain)
        counted = [done["metrics"] for done in answers]
        drafted |= {
            one["speculation"]["proposer"] for one in counted if one["speculative_decoding"]["num_draft_tokens"]
        }
    assert drafted == set(service.settings.proposers)


def test_metrics_grow_by_what_the_answers_say(service: Service) -> None:
    def now() -> Samples:
        return Samples(httpx.get(f"{service.url}/metrics", timeout=30).text)

    before = now()
    wish = {"mode": "on", "max_draft_tokens": 4, "proposer": "draft"}
    done = [complete(service, body(prompt, wish)) for prompt in PROMPTS]
    after = now()
    spoken = [answer["metrics"]["speculative_decoding"] for answer in done]
    names = {"drafts": "spec_steps", "draft_tokens": "draft_tokens", "accepted_tokens": "accepted_draft_tokens"}
    for name, key in names.items():
        metric = f"vllm:spec_decode_num_{name}_total"
        assert after.value(metric) - before.total(metric) == sum(one[f"num_{key}"] for one in spoken) > 0
    assert after.value("specserve_proposer_available", proposer="draft") == 1


@pytest.mark.parametrize("victim", ["proposer", "verifier", "target"])
def test_a_stream_survives_the_death_of_any_actor(service: Service, victim: str) -> None:
    wish = {"mode": "on", "max_draft_tokens": 3, "proposer": "draft"}
    expected = complete(service, body(PROMPTS[0], wish, max_tokens=300))["choices"][0]["text"]
    pid = service.pids()[victim]
    text = ""
    with httpx.stream(
        "POST", f"{service.url}/v1/completions", json=body(PROMPTS[0], wish, max_tokens=300, stream=True), timeout=120
    ) as answer:
        for number, event in enumerate(events(answer)):
            if number == 5:
                os.kill(pid, signal.SIGKILL)
            text += event["choices"][0]["text"] if event["choices"] else ""
    assert text == expected
    assert httpx.get(f"{service.url}/ready", timeout=30).status_code == 200


def test_a_client_that_goes_away_frees_everything_on_every_process(service: Service) -> None:
    wish = {"mode": "on", "max_draft_tokens": 3}
    for proposer in ("draft", "prompt_lookup"):
        sent = body(PROMPTS[1], {**wish, "proposer": proposer}, max_tokens=2000, stream=True)
        with httpx.stream("POST", f"{service.url}/v1/completions", json=sent, timeout=120) as answer:
            next(events(answer))
    for _ in range(200):
        report = service.report()
        held: Any = report["held_by_proposers"]
        if report["running"] == 0 and not any(held.values()):
            break
    assert report["running"] == 0
    assert not any(held.values())
    assert report["free_pages"] == report["num_pages"]
    assert int(str(report["cancelled"])) >= 2


def test_a_bad_request_is_refused_and_allocates_nothing(service: Service) -> None:
    before = service.report()
    for changes, status, param in (
        ({"model": "gpt-none"}, 404, "model"),
        ({"max_tokens": 100_000}, 400, "prompt"),
        ({"speculation": {"mode": "perhaps"}}, 400, "speculation.mode"),
    ):
        answer = httpx.post(f"{service.url}/v1/completions", json={**body("x", PLAIN), **changes}, timeout=30)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["param"] == param or param in error["message"]
        assert len(answer.headers.get_list("x-request-id")) == 1
    after = service.report()
    assert after["requests"] == before["requests"]
    assert after["free_pages"] == before["free_pages"]
