"""Speculation must not change a token: every proposer, gamma and batch against plain decoding, in float64."""

from pathlib import Path

import pytest
from support.cells import Cell, FixedPlanner, RandomPlanner, ScriptedProposer, save_tiny_llama

from specserve.service.messages import Acceptance, Sampling
from specserve.service.requests import GenerationRequest

GREEDY = Sampling()
SEEDED = Sampling(greedy=False, temperature=0.8, top_p=0.95, seed=11)


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Cell:
    folder: Path = tmp_path_factory.mktemp("models")
    return Cell(save_tiny_llama(folder / "target", 1), draft=save_tiny_llama(folder / "draft", 2, layers=1))


@pytest.fixture(scope="module")
def self_drafting(tmp_path_factory: pytest.TempPathFactory) -> Cell:
    return Cell(save_tiny_llama(tmp_path_factory.mktemp("models") / "target", 1))


def requests(sampling: Sampling, count: int = 3, max_tokens: int = 24) -> list[GenerationRequest]:
    prompts = [tuple((7 * index + 3 * place) % 50 + 10 for place in range(3 + 5 * index)) for index in range(count)]
    return [
        GenerationRequest(f"r{index}", prompt, sampling, max_tokens, ignore_eos=True)
        for index, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("proposer", ["prompt_lookup", "draft", "suffix"])
@pytest.mark.parametrize("gamma", [1, 4, 8])
def test_output_is_plain_decodings_whatever_is_drafted(
    cell: Cell, sampling: Sampling, proposer: str, gamma: int
) -> None:
    plain = cell.run(FixedPlanner(None, 0), requests(sampling))
    assert [done.token_ids for done in cell.run(FixedPlanner(proposer, gamma), requests(sampling))] == [
        done.token_ids for done in plain
    ]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_output_is_plain_decodings_when_everything_is_accepted(self_drafting: Cell, sampling: Sampling) -> None:
    plain = self_drafting.run(FixedPlanner(None, 0), requests(sampling))
    planner = FixedPlanner("draft", 5)
    assert [d.token_ids for d in self_drafting.run(planner, requests(sampling))] == [d.token_ids for d in plain]
    assert all(outcome.num_accepted == outcome.num_drafted for outcome in planner.outcomes)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("name", ["right", "wrong", "random", "constant", "eos", "broken", "stale", "outside"])
def test_output_is_plain_decodings_under_an_adversarial_proposer(cell: Cell, sampling: Sampling, name: str) -> None:
    (request,) = requests(sampling, 1)
    (plain,) = cell.run(FixedPlanner(None, 0), [request])
    answers = {len(request.prompt_token_ids) + place: token for place, token in enumerate(plain.token_ids)}
    planner = FixedPlanner(name, 4)
    (done,) = cell.run(planner, [request], [ScriptedProposer(name, answers)])
    assert done.token_ids == plain.token_ids
    accepted = sum(outcome.num_accepted for outcome in planner.outcomes)
    assert accepted > 0 if name == "right" else name in ("constant", "eos", "random") or accepted == 0


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("limits", [{}, {"num_pages": 24}, {"prefill_tokens": 3}, {"max_running": 2}], ids=str)
def test_output_does_not_depend_on_batch_preemption_or_chunks(
    cell: Cell, sampling: Sampling, limits: dict[str, int]
) -> None:
    alone = [cell.run(FixedPlanner(None, 0), [request])[0].token_ids for request in requests(sampling, 6)]
    together = cell.run(RandomPlanner(3), requests(sampling, 6), **limits)
    assert [done.token_ids for done in together] == alone


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_a_ratio_test_of_a_perfect_draft_accepts_nearly_everything(self_drafting: Cell, acceptance: Acceptance) -> None:
    sampling = Sampling(greedy=False, temperature=1.0, top_k=20, seed=3, acceptance=acceptance)
    planner = FixedPlanner("draft", 4)
    self_drafting.run(planner, requests(sampling, 4, 40))
    drafted = sum(outcome.num_drafted for outcome in planner.outcomes)
    accepted = sum(outcome.num_accepted for outcome in planner.outcomes)
    assert accepted / drafted > 0.97
