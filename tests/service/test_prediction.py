"""Predicted outputs change no token, cost nothing when wrong, and survive whatever the proposer forgets."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.cells import VOCAB_SIZE, Cell, Finished, FixedPlanner, save_tiny_llama
from support.rounds import SMALL_VOCAB, TokenRounds, answer, plain, started, token_engine

from specserve.service.errors import BadRequestError
from specserve.service.messages import DraftBatch, Prediction, ProposeBatch, ProposeRow, Sampling
from specserve.service.proposers.prediction import PredictionProposer
from specserve.service.requests import GenerationRequest

Tokens = tuple[int, ...]
PROMPT = tuple((7 * place) % 50 + 10 for place in range(9))
SEEDED = Sampling(greedy=False, temperature=0.8, top_p=0.95, seed=11)
SAMPLINGS = {
    "greedy": Sampling(),
    "seeded": SEEDED,
    "penalised": replace(SEEDED, presence_penalty=0.7, frequency_penalty=0.3, repetition_penalty=1.2),
}
EDITS: dict[str, Callable[[Tokens], Tokens]] = {
    "right": lambda right: right,
    "edited": lambda right: (*right[:6], 3, *right[7:12], 5, 6, 7, *right[12:20], *right[24:]),
    "wrong": lambda right: tuple((token + 1) % VOCAB_SIZE for token in right),
    "of one token": lambda right: right[:1],
    "repeating": lambda right: right[:3] * 30,
    "shuffled": lambda right: tuple(random.Random(4).sample(right, len(right))),
}


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Cell:
    folder: Path = tmp_path_factory.mktemp("models")
    return Cell(save_tiny_llama(folder / "target", 1), draft=save_tiny_llama(folder / "draft", 2, layers=1))


def request(
    prediction: Tokens | None, sampling: Sampling = SEEDED, name: str = "r", **more: object
) -> GenerationRequest:
    limits: dict[str, object] = {"max_tokens": 40, "ignore_eos": True, "prediction_token_ids": prediction, **more}
    return GenerationRequest(name, PROMPT, sampling, **limits)  # type: ignore[arg-type]


def appeared(done: Finished) -> int | None:
    summary = done.steps[-1].summary
    assert summary is not None
    return summary.accepted_prediction_tokens


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("gamma", [1, 4, 8])
def test_a_prediction_changes_no_token_and_its_count_depends_on_no_draft(
    cell: Cell, sampling: Sampling, edit: str, gamma: int
) -> None:
    (right,) = cell.run(FixedPlanner(None, 0), [request(None, sampling)])
    predicted = EDITS[edit](right.token_ids)
    wanted = [request(predicted, sampling, f"r{number}", num_logprobs=2) for number in range(2)]
    plainly = cell.run(FixedPlanner(None, 0), wanted)
    planner = FixedPlanner("prediction", gamma)
    drafted = cell.run(planner, wanted, [PredictionProposer()])
    for done, same in zip(drafted, plainly, strict=True):
        assert done.token_ids == same.token_ids == right.token_ids
        assert [one for step in done.steps for one in step.logprobs] == [
            one for step in same.steps for one in step.logprobs
        ]
        assert appeared(done) == appeared(same)
    accepted = sum(outcome.num_accepted for outcome in planner.outcomes)
    if edit == "right":
        assert appeared(drafted[0]) == 40
        assert accepted == sum(outcome.num_drafted for outcome in planner.outcomes) > 0
    if edit == "wrong":
        assert accepted == 0
    assert appeared(right) is None


@pytest.mark.parametrize(
    "more", [{"stop": ("e",)}, {"min_tokens": 30}, {"ignore_eos": False}, {"max_tokens": 1}], ids=str
)
def test_an_end_within_a_prediction_is_plain_decodings(cell: Cell, more: dict[str, object]) -> None:
    (right,) = cell.run(FixedPlanner(None, 0), [request(None)])
    wanted = request(right.token_ids, **more)
    (expected,) = cell.run(FixedPlanner(None, 0), [wanted])
    (done,) = cell.run(FixedPlanner("prediction", 8), [wanted], [PredictionProposer()])
    assert (done.text, done.token_ids) == (expected.text, expected.token_ids)
    assert appeared(done) == len(done.token_ids)


def served(prediction: Tokens, gamma: int, num_tokens: int, proposer: object = None) -> tuple[Tokens, float]:
    """Return the output by the rule of `TokenRounds`, and its tokens per round."""
    wanted = GenerationRequest("r", (5, 6, 7), Sampling(), num_tokens, ignore_eos=True, prediction_token_ids=prediction)

    async def main() -> tuple[Tokens, float]:
        used = proposer or PredictionProposer()
        async with started(token_engine(TokenRounds(128, 4), FixedPlanner("prediction", gamma), [used])) as engine:  # type: ignore[list-item]
            done = await answer(engine, wanted)
            summary = done.steps[-1].summary
            assert summary is not None
            return done.token_ids, num_tokens / (summary.num_rounds + 1)

    return asyncio.run(asyncio.wait_for(main(), 60))


def edited(tokens: Tokens, every: int) -> Tokens:
    """Return an older version of a text: by turns something else, something less or something more every so often."""
    old: list[int] = []
    for number, start in enumerate(range(0, len(tokens), every)):
        piece = tokens[start : start + every]
        old += [(1, *piece[1:]), piece[2:], (2, 3, *piece)][number % 3]
    return tuple(old)


def test_a_copy_with_an_edit_every_24_tokens_gets_more_than_three_tokens_a_round() -> None:
    right = plain((5, 6, 7), 240)
    tokens, per_round = served(edited(right, 24), 8, 240)
    assert tokens == right
    assert per_round > 3.0


def test_a_wrong_prediction_costs_no_round() -> None:
    right = plain((5, 6, 7), 60)
    wrong = tuple(random.Random(1).randrange(1, SMALL_VOCAB) for _ in range(60))
    tokens, per_round = served(wrong, 8, 60)
    assert tokens == right
    assert per_round >= 1.0


class Forgetful(PredictionProposer):
    """Forgets everything in the last of so many rounds, and remembers what it was sent."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.rows: list[ProposeRow] = []
        self._every = every

    def propose(self, batch: ProposeBatch) -> DraftBatch:
        self.rows += batch.rows
        if batch.round % self._every == self._every - 1:
            self._held.clear()
        return super().propose(batch)


def test_the_prediction_travels_once_and_again_only_to_a_proposer_that_forgot() -> None:
    right = plain((5, 6, 7), 200)
    once, forgetful = Forgetful(10_000), Forgetful(5)
    assert served(right, 8, 200, once)[0] == right
    assert [row.prediction is not None for row in once.rows] == [True] + [False] * (len(once.rows) - 1)
    tokens, per_round = served(right, 8, 200, forgetful)
    assert tokens == right
    assert per_round > 3.0
    assert all((row.prediction is not None) == (row.known_len == 0) for row in forgetful.rows)
    assert sum(row.prediction is not None for row in forgetful.rows) > 2


def test_a_row_that_skips_tokens_or_brings_no_prediction_gets_no_draft_and_is_forgotten() -> None:
    proposer = PredictionProposer()
    first = ProposeRow("r", 4, 0, (1, 2, 3, 10), 4, Sampling(), Prediction(3, (10, 11, 12, 13)))

    def ask(row: ProposeRow) -> DraftBatch:
        return proposer.propose(ProposeBatch(0, "prediction", (row,)))

    assert [draft.token_ids for draft in ask(first).drafts] == [(11, 12, 13)]
    assert [draft.token_ids for draft in ask(ProposeRow("r", 5, 4, (11,), 1, Sampling())).drafts] == [(12,)]
    skipping = ask(ProposeRow("r", 8, 7, (13,), 4, Sampling()))
    assert (skipping.drafts, skipping.num_held_requests) == ((), 0)
    assert ask(ProposeRow("s", 4, 0, (1, 2, 3, 10), 4, Sampling())).drafts == ()


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prediction": None, "proposer": "prediction"}, "speculation.proposer"),
        ({"prediction": (), "proposer": "prediction"}, "speculation.proposer"),
        ({"prediction": (SMALL_VOCAB,)}, "prediction"),
        ({"prediction": (-1,)}, "prediction"),
        ({"prediction": (1,) * 513}, "prediction"),
    ],
)
def test_a_prediction_that_cannot_be_is_refused(changes: dict[str, object], param: str) -> None:
    prediction = changes.pop("prediction")
    wanted = GenerationRequest("r", (1, 2), Sampling(), 4, prediction_token_ids=prediction, **changes)  # type: ignore[arg-type]

    async def main() -> None:
        engine = token_engine(TokenRounds(128, 4), FixedPlanner("prediction", 2), [PredictionProposer()])
        async with started(engine):
            with pytest.raises(BadRequestError) as refused:
                engine.submit(wanted)
            assert refused.value.param == param
            await answer(engine, GenerationRequest("r", (1, 2), Sampling(), 4, prediction_token_ids=(1,) * 512))

    asyncio.run(asyncio.wait_for(main(), 60))
