"""JSON under speculation: the tokens are plain decoding's, whatever is drafted, and every answer is what its schema
says."""

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from support.cells import Cell, FixedPlanner, RandomPlanner, ScriptedProposer, save_tiny_llama
from support.schemas import schemas

from specserve.service.errors import RoundLostError
from specserve.service.grammar import Grammars
from specserve.service.json_schema import json_grammar
from specserve.service.messages import Draft, DraftBatch, Features, ProposeBatch, Sampling, VerdictBatch, VerifyBatch
from specserve.service.requests import GenerationRequest
from specserve.service.verifier import Verifier

GREEDY = Sampling()
SEEDED = Sampling(greedy=False, temperature=1.0, seed=11)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", "ccc"]}, "minItems": 2, "maxItems": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "tags", "age"],
    "additionalProperties": False,
}
PROMPT = (30, 41, 52, 63, 74)
BRACE = 95


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Cell:
    return Cell(save_tiny_llama(tmp_path_factory.mktemp("models") / "target", 1))


def request(sampling: Sampling, schema: Any = PERSON, max_tokens: int = 200, **fields: Any) -> GenerationRequest:
    return GenerationRequest(
        "r", PROMPT, sampling, max_tokens, grammar=json_grammar(schema, "response_format"), **fields
    )


class Interrupted:
    """Right drafts, in each of which the token at one place is another: `broken`, or an opening brace."""

    def __init__(self, answer: tuple[int, ...], place: int, token_id: int) -> None:
        self.name = "interrupted"
        self._right = ScriptedProposer("right", {len(PROMPT) + i: token for i, token in enumerate(answer)})
        self._place = place
        self._token_id = token_id

    def propose(self, batch: ProposeBatch) -> DraftBatch:
        self._right.name = "right"
        drafts = []
        for draft in self._right.propose(batch).drafts:
            tokens = list(draft.token_ids)
            tokens[self._place : self._place + 1] = [self._token_id] * (self._place < len(tokens))
            drafts.append(replace(draft, token_ids=tuple(tokens)))
        return DraftBatch(batch.round, tuple(drafts), 0)


@pytest.fixture(scope="module")
def plain(cell: Cell) -> dict[str, tuple[int, ...]]:
    runs = {"greedy": GREEDY, "seeded": SEEDED}
    return {name: cell.run(FixedPlanner(None, 0), [request(how)])[0].token_ids for name, how in runs.items()}


@pytest.mark.parametrize("how", ["greedy", "seeded"])
@pytest.mark.parametrize("proposer", ["prompt_lookup", "draft"])
def test_json_is_plain_decodings_whatever_is_drafted(
    cell: Cell, plain: dict[str, tuple[int, ...]], how: str, proposer: str
) -> None:
    sampling = GREEDY if how == "greedy" else SEEDED
    (done,) = cell.run(FixedPlanner(proposer, 5), [request(sampling)])
    assert done.token_ids == plain[how]
    if done.steps[-1].finish_reason == "stop":
        jsonschema.validate(json.loads(done.text), PERSON)


@pytest.mark.parametrize("how", ["greedy", "seeded"])
@pytest.mark.parametrize("token_id", [BRACE, 0, 17], ids=["brace", "eos", "word"])
@pytest.mark.parametrize("place", range(4))
def test_a_forbidden_token_at_any_place_of_a_draft_changes_nothing(
    cell: Cell, plain: dict[str, tuple[int, ...]], how: str, token_id: int, place: int
) -> None:
    sampling = GREEDY if how == "greedy" else SEEDED
    (done,) = cell.run(FixedPlanner("interrupted", 4), [request(sampling)], [Interrupted(plain[how], place, token_id)])
    assert done.token_ids == plain[how]


@pytest.mark.parametrize("how", ["greedy", "seeded"])
def test_right_drafts_are_accepted_up_to_the_last_brace(
    cell: Cell, plain: dict[str, tuple[int, ...]], how: str
) -> None:
    answers = {len(PROMPT) + place: token for place, token in enumerate(plain[how])}
    planner = FixedPlanner("right", 4)
    (done,) = cell.run(planner, [request(GREEDY if how == "greedy" else SEEDED)], [ScriptedProposer("right", answers)])
    assert done.token_ids == plain[how]
    assert sum(outcome.num_accepted for outcome in planner.outcomes) > len(plain[how]) // 2


class Branching:
    """A tree: at each of four depths an opening brace with a word below it, and the right token, that goes on."""

    name = "branching"

    def __init__(self, answer: tuple[int, ...]) -> None:
        self._answer = answer

    def propose(self, batch: ProposeBatch) -> DraftBatch:
        drafts = []
        for row in batch.rows:
            tokens: list[int] = []
            parents: list[int] = []
            at, place = 0, row.committed_len - len(PROMPT)
            for right in self._answer[place : place + min(4, row.gamma // 3)]:
                tokens += [BRACE, 17, right]
                parents += [at, len(tokens) - 2, at]
                at = len(tokens)
            drafts.append(Draft(row.request_id, row.committed_len, tuple(tokens), parents=tuple(parents)))
        return DraftBatch(batch.round, tuple(drafts), 0)


@pytest.mark.parametrize("how", ["greedy", "seeded"])
def test_branches_that_the_grammar_forbids_are_cut_and_the_right_one_is_accepted(
    cell: Cell, plain: dict[str, tuple[int, ...]], how: str
) -> None:
    planner = FixedPlanner("branching", 12)
    (done,) = cell.run(planner, [request(GREEDY if how == "greedy" else SEEDED)], [Branching(plain[how])])
    assert done.token_ids == plain[how]
    assert sum(outcome.num_accepted for outcome in planner.outcomes) > len(plain[how]) // 2
    assert sum(outcome.num_drafted for outcome in planner.outcomes) < 3 * len(plain[how])


@pytest.mark.parametrize("name", ["random", "constant", "eos", "broken", "stale", "outside"])
def test_garbage_drafts_change_nothing(cell: Cell, plain: dict[str, tuple[int, ...]], name: str) -> None:
    (done,) = cell.run(FixedPlanner(name, 4), [request(SEEDED)], [ScriptedProposer(name)])
    assert done.token_ids == plain["seeded"]


class Restarted:
    """A verifier that is a new process in every round, and loses each third round after it has decided it."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._num_rounds = 0

    def verify(self, features: Features, batch: VerifyBatch) -> VerdictBatch:
        self._num_rounds += 1
        grammars = Grammars(self._cell.tokenizer, 4096, self._cell.model.shape.eos_token_ids)
        verdicts = Verifier(self._cell.model, grammars).verify(features, batch)
        if self._num_rounds % 3 == 0:
            raise RoundLostError("lost on purpose")
        return verdicts


class Replayed:
    """A verifier that loses each third round after its matchers have moved on."""

    def __init__(self, cell: Cell) -> None:
        self._verifier = Verifier(cell.model, cell.grammars)
        self._num_rounds = 0

    def verify(self, features: Features, batch: VerifyBatch) -> VerdictBatch:
        self._num_rounds += 1
        verdicts = self._verifier.verify(features, batch)
        if self._num_rounds % 3 == 0:
            raise RoundLostError("lost on purpose")
        return verdicts


@pytest.mark.parametrize("kind", [Restarted, Replayed])
def test_a_verifier_that_restarts_or_replays_goes_on_with_the_same_grammar(
    cell: Cell, plain: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, kind: type[Any]
) -> None:
    monkeypatch.setattr(cell, "verifier", lambda: kind(cell))
    (done,) = cell.run(RandomPlanner(4), [request(SEEDED)], [Interrupted(plain["seeded"], 1, BRACE)])
    assert done.token_ids == plain["seeded"]


def test_structured_and_free_requests_decode_together(cell: Cell) -> None:
    free = GenerationRequest("free", PROMPT, SEEDED, 30, ignore_eos=True)
    both = cell.run(RandomPlanner(3), [request(SEEDED), free])
    alone = [cell.run(FixedPlanner(None, 0), [one])[0] for one in (request(SEEDED), free)]
    assert [done.token_ids for done in both] == [done.token_ids for done in alone]


def test_output_cut_by_max_tokens_ends_as_length(cell: Cell, plain: dict[str, tuple[int, ...]]) -> None:
    (done,) = cell.run(FixedPlanner("draft", 4), [request(SEEDED, max_tokens=5)])
    assert done.token_ids == plain["seeded"][:5]
    assert done.steps[-1].finish_reason == "length"


@pytest.mark.parametrize("fields", [{"ignore_eos": True}, {"min_tokens": 190}], ids=str)
def test_a_complete_grammar_ends_the_request_whatever_it_asked_for(cell: Cell, fields: dict[str, Any]) -> None:
    constant = {"const": {"a": [1]}}
    (done,) = cell.run(FixedPlanner("draft", 4), [request(SEEDED, constant, **fields)])
    assert json.loads(done.text) == {"a": [1]}
    assert done.steps[-1].finish_reason == "stop"


def test_penalties_and_logprobs_go_with_a_grammar(cell: Cell) -> None:
    sampling = Sampling(
        greedy=False, seed=3, frequency_penalty=0.7, repetition_penalty=1.2, logit_bias=((BRACE, -100.0),)
    )
    one = request(sampling, {"const": {"a": [1]}}, num_logprobs=2, min_tokens=4)
    runs = [cell.run(FixedPlanner(name, 4), [one])[0] for name in (None, "draft")]
    assert runs[0].token_ids == runs[1].token_ids
    assert json.loads(runs[1].text) == {"a": [1]}
    assert sum(len(step.logprobs) for step in runs[1].steps) == len(runs[1].token_ids)


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=schemas(4))
def test_what_a_schema_asks_for_is_what_comes(cell: Cell, batch: list[Any]) -> None:
    """Sixty schemas; an output that met its limit is the beginning of a JSON text, and no more is asked of it."""
    sampled = [
        GenerationRequest(
            f"r{place}", PROMPT, Sampling(greedy=False, seed=place), 400,
            grammar=json_grammar(schema, "response_format"),
        )
        for place, schema in enumerate(batch)
    ]  # fmt: skip
    for done, schema in zip(cell.run(RandomPlanner(5), sampled), batch, strict=True):
        if done.steps[-1].finish_reason == "stop":
            jsonschema.validate(json.loads(done.text), schema)
