"""transformers' generate as the bench measures it: full length whatever is generated, the same greedy text each way."""

import io
import json
from pathlib import Path

import pytest
import torch

from specserve.deployments.benching import Generation, answer_commands
from specserve.service.errors import SpecserveError
from specserve.service.models import embedded_dir, read_shape

PROMPTS = [["completion", "class A:\n    def __init__(self):"], ["chat", "Repeat `a = 1`."], ["completion", "x"]]


@pytest.fixture(scope="module")
def generation() -> Generation:
    return Generation(embedded_dir("target"), embedded_dir("draft"))


def _command(**changed: object) -> str:
    command = {"setting": "plain", "prompts": PROMPTS, "batch": 2, "max_tokens": 6, "temperature": 0.0}
    return json.dumps(command | changed) + "\n"


def _answers(generation: Generation, *commands: str) -> list[dict[str, object]]:
    written = io.StringIO()
    answer_commands(generation, io.StringIO("".join(commands)), written)
    return [json.loads(line) for line in written.getvalue().splitlines()]


def test_a_model_without_assistant_offers_none(generation: Generation) -> None:
    assert generation.offer()["settings"] == ["plain", "prompt_lookup", "assistant"]
    assert Generation(embedded_dir("draft"), None).offer()["settings"] == ["plain", "prompt_lookup"]


def test_each_batch_says_its_seconds_and_tokens(generation: Generation) -> None:
    (answer,) = _answers(generation, _command())
    batches = answer["batches"]
    assert isinstance(batches, list)
    lengths = [len(generation.token_ids(kind, text)) for kind, text in PROMPTS]
    assert [batch["num_prompt_tokens"] for batch in batches] == [lengths[:2], lengths[2:]]
    assert {batch["num_tokens"] for batch in batches} == {6}
    assert all(batch["wall_s"] > 0 for batch in batches)


def test_a_command_that_fails_is_answered_and_the_next_one_runs(generation: Generation) -> None:
    first, second = _answers(generation, _command(setting="magic"), _command(prompts=PROMPTS[:1], max_tokens=1))
    assert "magic" in str(first["error"])
    assert "batches" in second


@pytest.mark.parametrize("way", ["plain", "prompt_lookup", "assistant"])
def test_end_tokens_end_nothing(generation: Generation, way: str) -> None:
    asked = "Repeat this function with the name `f` changed to `g`:\n```python\ndef f(a):\n    return a\n```"
    found = generation.generate(way, [generation.token_ids("chat", asked)], 24, 0.0)
    ends = set(read_shape(embedded_dir("target")).eos_token_ids)
    assert ends & set(found[0, :-1].tolist()), "the prompt no longer makes the model end, so this shows nothing"
    assert found.shape == (1, 24)


@pytest.mark.parametrize("way", ["plain", "prompt_lookup", "assistant"])
def test_sampling_fills_the_length_too(generation: Generation, way: str) -> None:
    assert generation.generate(way, [generation.token_ids("completion", "x")], 6, 0.8).shape == (1, 6)


def test_padding_changes_no_prompt(generation: Generation) -> None:
    prompts = [generation.token_ids(kind, text) for kind, text in PROMPTS[:2]]
    longest = max(map(len, prompts))
    assert {len(prompt) for prompt in prompts} != {longest}
    together = generation.generate("plain", prompts, 1, 0.0)
    alone = [generation.generate("plain", [prompt], 1, 0.0) for prompt in prompts]
    assert torch.equal(together, torch.cat(alone))


def test_what_is_no_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SpecserveError):
        Generation(tmp_path, None)
