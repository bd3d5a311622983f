"""Bugs that other engines had where an output ends inside an accepted draft: stop strings, stop tokens, max_tokens.

Each is compared with plain decoding under three drafters, in float32. The threads: vllm 47616; sglang 31599, 33758;
lattice 242; ik_llama.cpp 2358.
"""

import itertools
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from support.cells import Cell, save_tiny_llama
from support.drafters import DRAFTERS, GAMMA, Answer, Known, assert_same, drafted, known, plain

from specserve.service.messages import Sampling
from specserve.service.requests import GenerationRequest

PROMPT = (10, 20, 30, 40, 50)
SAMPLINGS = {"greedy": Sampling(), "seeded": Sampling(greedy=False, temperature=0.9, top_p=0.95, seed=5)}
LENGTH = 2 * GAMMA + 3


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Cell:
    return Cell(save_tiny_llama(tmp_path_factory.mktemp("models") / "target", 1), torch.float32)


def asked(name: object, sampling: Sampling, **changes: object) -> GenerationRequest:
    fields: dict[str, object] = {"max_tokens": LENGTH, "ignore_eos": True, "num_logprobs": 2, **changes}
    return GenerationRequest(str(name), PROMPT, sampling, **fields)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=SAMPLINGS)
def whole(request: pytest.FixtureRequest, cell: Cell) -> tuple[Sampling, Answer]:
    """What the model says when nothing ends it early."""
    sampling = SAMPLINGS[request.param]
    (answer,) = plain(cell, [asked("whole", sampling)])
    assert answer.finish_reason == "length"
    return sampling, answer


def known_for(cell: Cell, sampling: Sampling, requests: list[GenerationRequest]) -> Known:
    (tokens,) = known(cell, [asked("whole", sampling)]).values()
    return dict.fromkeys((r.request_id for r in requests), tokens)


def pieces(cell: Cell, token_ids: tuple[int, ...]) -> Mapping[int, str]:
    """The text that each token adds, where it is text of its own."""
    decoded = [cell.tokenizer.decode(token_ids[:n], skip_special_tokens=True) for n in range(len(token_ids) + 1)]
    added = {n: after[len(before) :] for n, (before, after) in enumerate(itertools.pairwise(decoded))}
    return {place: piece for place, piece in added.items() if piece and piece.isascii()}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_stop_string_cuts_text_tokens_logprobs_and_usage_at_the_same_place(
    cell: Cell, whole: tuple[Sampling, Answer], drafter: str
) -> None:
    """Stops that one token completes, and stops that begin in one token and end in the next."""
    sampling, answer = whole
    found = pieces(cell, answer.token_ids)
    stops = {f"{place}": piece for place, piece in found.items()}
    stops |= {f"{p}+": piece[-1] + found[p + 1][:1] for p, piece in found.items() if p + 1 in found}
    assert len(stops) > LENGTH
    requests = [asked(name, sampling, stop=(stop,)) for name, stop in stops.items()]
    expected = plain(cell, requests)
    assert_same(drafted(cell, requests, drafter, known_for(cell, sampling, requests)), expected)
    for one, stop in zip(expected, stops.values(), strict=True):
        assert one.finish_reason == "stop"
        assert stop not in one.text
        assert answer.token_ids[: len(one.token_ids)] == one.token_ids
        assert stop in cell.tokenizer.decode(one.token_ids, skip_special_tokens=True)
        assert stop not in cell.tokenizer.decode(one.token_ids[:-1], skip_special_tokens=True)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_stop_token_before_max_tokens_is_a_stop_and_after_it_a_length(
    cell: Cell, whole: tuple[Sampling, Answer], drafter: str
) -> None:
    sampling, answer = whole
    places = [place for place, token in enumerate(answer.token_ids) if answer.token_ids.index(token) == place]
    assert len(places) > GAMMA + 2
    requests = [
        asked(f"{place} {limit}", sampling, stop_token_ids=(answer.token_ids[place],), max_tokens=limit)
        for place in places
        for limit in range(1, GAMMA + 3)
    ]
    expected = plain(cell, requests)
    assert_same(drafted(cell, requests, drafter, known_for(cell, sampling, requests)), expected)
    for one, sent in zip(expected, requests, strict=True):
        place, limit = map(int, sent.request_id.split())
        assert len(one.token_ids) == min(place + 1, limit)
        assert one.finish_reason == ("stop" if place < limit else "length")


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("gamma", [1, GAMMA, 8])
def test_max_tokens_is_met_exactly_and_usage_counts_what_was_sent(
    cell: Cell, whole: tuple[Sampling, Answer], drafter: str, gamma: int
) -> None:
    sampling, answer = whole
    requests = [asked(limit, sampling, max_tokens=limit) for limit in range(1, min(gamma + 2, LENGTH) + 1)]
    expected = plain(cell, requests)
    assert_same(drafted(cell, requests, drafter, known_for(cell, sampling, requests), gamma), expected)
    for limit, one in enumerate(expected, 1):
        assert one.token_ids == answer.token_ids[:limit]
        assert one.usage == (len(PROMPT), limit)
        assert one.finish_reason == "length"


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_end_token_is_the_last_one_wherever_in_a_draft_it_comes(
    cell: Cell, whole: tuple[Sampling, Answer], drafter: str
) -> None:
    """The model's own end token, made the likeliest from some length on by barring it before."""
    sampling, _ = whole
    biased = replace(sampling, logit_bias=((0, 100.0),))
    requests = [asked(n, biased, min_tokens=n, ignore_eos=False) for n in range(LENGTH)]
    (unended,) = plain(cell, [asked("x", biased, min_tokens=LENGTH, stop_token_ids=(0,))])
    tokens = (*PROMPT, *unended.token_ids, 0, 0, 0, 0)
    answers = drafted(cell, requests, drafter, {r.request_id: tokens for r in requests})
    assert_same(answers, plain(cell, requests))
    for num_before, one in enumerate(answers):
        assert one.token_ids == (*unended.token_ids[:num_before], 0)
        assert one.finish_reason == "stop"
