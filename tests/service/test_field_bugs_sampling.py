"""Bugs that other engines had with sampling parameters at accepted positions: penalties, bias, logprobs, seeds.

Each is compared with plain decoding under three drafters, in float32. The threads: sglang 33643; vllm 18902, 42744,
17876, 34497, 6038; llama.cpp 27972; TRT-LLM 19487, 17599; DeepSpec 31; dflash 74; sglang 32922.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cells import Cell, save_tiny_llama
from support.drafters import DRAFTERS, GAMMA, assert_same, drafted, known, plain
from transformers import AutoModelForCausalLM

from specserve.service.acceptance import inverse_cdf
from specserve.service.messages import Acceptance, History, Sampling, VerifyRow
from specserve.service.noise import Role, uniform
from specserve.service.requests import GenerationRequest
from specserve.service.sampling import target_log_probs
from specserve.service.verifier import decide

PROMPT = (10, 20, 30, 10, 20)
GREEDY = Sampling()
SEEDED = Sampling(greedy=False, temperature=0.9, top_p=0.95, seed=5)
BOTH = pytest.mark.parametrize("base", [GREEDY, SEEDED], ids=["greedy", "seeded"])
EVERY_DRAFTER = pytest.mark.parametrize("drafter", DRAFTERS)
END = 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "target", 1)


@pytest.fixture(scope="module")
def cell(folder: Path) -> Cell:
    return Cell(folder, torch.float32)


def asked(name: object, sampling: Sampling, **changes: Any) -> GenerationRequest:
    return GenerationRequest(str(name), PROMPT, sampling, **{"max_tokens": 24, "ignore_eos": True, **changes})


@EVERY_DRAFTER
@BOTH
def test_penalties_have_their_full_strength_at_every_accepted_token(cell: Cell, base: Sampling, drafter: str) -> None:
    """Six tokens are likely everywhere, so that they repeat when nothing holds them back."""
    flat = replace(base, logit_bias=tuple((token, 30.0) for token in range(40, 46)))
    penalties = [
        {"frequency_penalty": 3.0}, {"frequency_penalty": -3.0}, {"presence_penalty": 9.0}, {"repetition_penalty": 1.5},
        {"repetition_penalty": 1.2, "presence_penalty": 2.0, "frequency_penalty": 2.0},
    ]  # fmt: skip
    samplings = [replace(flat, **penalty) for penalty in penalties]
    requests = [asked(number, sampling, num_logprobs=3) for number, sampling in enumerate(samplings)]
    expected = plain(cell, requests)
    assert_same(drafted(cell, requests, drafter, known(cell, requests)), expected)
    (free,) = plain(cell, [asked("free", flat)])
    assert len({one.token_ids for one in [*expected, free]}) > 3
    assert max(Counter(expected[0].token_ids).values()) < max(Counter(free.token_ids).values())


@EVERY_DRAFTER
@BOTH
def test_min_tokens_counts_tokens_not_rounds(cell: Cell, base: Sampling, drafter: str) -> None:
    """The end token is the likeliest everywhere: it comes at once when it may."""
    eager = replace(base, logit_bias=((END, 100.0), (77, 60.0)))
    counts = [*range(2 * GAMMA + 2), 20]
    requests = [asked(count, eager, min_tokens=count, ignore_eos=False, num_logprobs=0) for count in counts]
    stops = [asked(f"{count} s", eager, min_tokens=count, stop_token_ids=(END, 77)) for count in counts]
    (unended,) = plain(cell, [asked("x", eager, min_tokens=24, ignore_eos=False)])
    says = (*PROMPT, *unended.token_ids, *(END,) * GAMMA)
    answers = drafted(cell, requests + stops, drafter, {r.request_id: says for r in requests + stops})
    assert_same(answers, plain(cell, requests + stops))
    for count, one in zip(counts, answers, strict=False):
        assert one.token_ids == (*unended.token_ids[:count], END)
    for count, one in zip(counts, answers[len(counts) :], strict=True):
        assert len(one.token_ids) == count + 1
        assert one.token_ids[-1] == END
        assert not {END, 77} & set(one.token_ids[:-1])


@EVERY_DRAFTER
@BOTH
def test_a_biased_token_never_appears_at_any_position(cell: Cell, base: Sampling, drafter: str) -> None:
    (free,) = plain(cell, [asked("free", base)])
    banned = replace(base, logit_bias=tuple((token, -100.0) for token in sorted(set(free.token_ids))))
    one_banned = [replace(base, logit_bias=((token, -100.0),)) for token in free.token_ids[:6]]
    wanted = replace(base, logit_bias=((17, 100.0),))
    requests = [asked(n, sampling, num_logprobs=2) for n, sampling in enumerate([banned, wanted, *one_banned])]
    expected = plain(cell, requests)
    assert_same(drafted(cell, requests, drafter, known(cell, requests)), expected)
    assert not set(expected[0].token_ids) & set(free.token_ids)
    assert set(expected[1].token_ids) == {17}
    # A drafter that knows the unbiased output proposes exactly what must not appear.
    misled = dict.fromkeys((r.request_id for r in requests), (*PROMPT, *free.token_ids, 1, 1, 1, 1))
    assert_same(drafted(cell, requests, "scripted", misled), expected)


@EVERY_DRAFTER
def test_min_p_top_k_and_top_p_reach_every_position(cell: Cell, drafter: str) -> None:
    cuts: list[dict[str, Any]] = [
        {"min_p": 0.3},
        {"top_k": 2},
        {"top_p": 0.4},
        {"top_k": 5, "top_p": 0.7, "min_p": 0.1},
    ]
    samplings = [Sampling(greedy=False, temperature=1.5, seed=seed, **cut) for seed in range(3) for cut in cuts]
    requests = [asked(number, sampling) for number, sampling in enumerate(samplings)]
    expected = plain(cell, requests)
    assert_same(drafted(cell, requests, drafter, known(cell, requests)), expected)
    assert len({one.token_ids for one in expected}) > 6


@EVERY_DRAFTER
@BOTH
def test_logprobs_are_the_raw_targets_for_accepted_corrected_and_bonus_tokens(
    cell: Cell, folder: Path, base: Sampling, drafter: str
) -> None:
    shaped = replace(base, presence_penalty=1.0, logit_bias=((17, 3.0),), temperature=0.7)
    requests = [asked(f"{count}", shaped, num_logprobs=count) for count in (0, 1, 5, 20)]
    answers = drafted(cell, requests, drafter, known(cell, requests))
    assert_same(answers, plain(cell, requests))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for one, request in zip(answers, requests, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[*PROMPT, *one.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
        raw = logits.log_softmax(-1)
        assert len(one.logprobs) == len(one.token_ids)
        for row, token, logprob in zip(raw, one.token_ids, one.logprobs, strict=True):
            assert logprob.logprob == pytest.approx(float(row[token]), abs=1e-3)
            assert request.num_logprobs == len(logprob.top)
            best = row.topk(len(logprob.top)).values.tolist() if logprob.top else []
            assert [value for _, value in logprob.top] == pytest.approx(best, abs=1e-3)


@EVERY_DRAFTER
@pytest.mark.parametrize("gamma", [2, 5])
def test_a_seed_gives_the_same_tokens_alone_and_in_every_batch(cell: Cell, drafter: str, gamma: int) -> None:
    wanted = asked("wanted", SEEDED)
    others = [asked(n, replace(SEEDED, seed=n + 100), max_tokens=5 + n) for n in range(15)]
    (alone,) = plain(cell, [wanted])
    told = known(cell, [wanted, *others])
    for company in (0, 3, 15):
        batch = [*others[: company // 2], wanted, *others[company // 2 : company]]
        assert drafted(cell, batch, drafter, told, gamma)[company // 2] == alone
        assert plain(cell, batch)[company // 2] == alone
    assert len({one.token_ids for one in plain(cell, others)}) == len(others)


@EVERY_DRAFTER
@pytest.mark.parametrize("acceptance", ["coupled", "rejection", "block"])
def test_a_sampled_request_is_not_silently_greedy(cell: Cell, drafter: str, acceptance: Acceptance) -> None:
    hot = Sampling(greedy=False, temperature=1.0, acceptance=acceptance)
    requests = [asked(n, replace(hot, seed=n), max_tokens=8) for n in range(40)]
    expected = plain(cell, requests)
    answers = drafted(cell, requests, drafter, known(cell, requests))
    first, distinct = len({one.token_ids[1] for one in expected}), len({one.token_ids for one in expected})
    assert distinct > 20
    if acceptance == "coupled" or drafter != "self":
        assert_same(answers, expected)
    else:
        assert abs(len({one.token_ids[1] for one in answers}) - first) < 8
        assert len({one.token_ids for one in answers}) > 20


@pytest.mark.parametrize("acceptance", ["coupled", "rejection", "block"])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.8}], ids=str)
def test_draws_have_the_targets_frequencies_when_the_draft_came_from_elsewhere(
    settings: dict[str, Any], acceptance: Acceptance
) -> None:
    """Pairs of tokens of 5, 1500 rounds with a draft of one; false alarm below 1e-6 a case: chi-square of at most 24
    degrees of freedom above 80. Seeds are fixed."""
    num_rounds, vocab = 1500, 5
    base = Sampling(greedy=False, acceptance=acceptance, presence_penalty=0.8, **settings)
    generator = torch.Generator().manual_seed(3)
    first, second = (torch.randn(shape, generator=generator).double() for shape in ((vocab,), (vocab, vocab)))
    draft_probs = torch.tensor([0.1, 0.4, 0.1, 0.3, 0.1], dtype=torch.float64)
    rows, logits = [], []
    for seed in range(num_rounds):
        token = inverse_cdf(draft_probs, uniform(seed, 7, Role.DRAFT))
        ids, probs = np.arange(vocab, dtype=np.int32)[None], draft_probs.float().numpy()[None]
        sampled = (ids, probs) if acceptance != "coupled" else (None, None)
        rows.append(VerifyRow("r", 7, replace(base, seed=seed), (token,), *sampled, None, history=history()))
        logits.append(torch.stack([first, second[token]]))
    found: Counter[tuple[int, ...]] = Counter()
    for verdict, row in zip(decide(torch.cat(logits), tuple(rows)), rows, strict=True):
        emitted = verdict.token_ids
        if len(emitted) == 1:  # what plain decoding does next
            row = replace(row, committed_len=8, draft_token_ids=(), support_ids=None, support_probs=None)
            row = replace(row, sampling=replace(row.sampling, acceptance="coupled"), history=history(emitted[0]))
            emitted += decide(second[emitted[0]][None], (row,))[0].token_ids
        found[emitted] += 1
    expected = joint(first, second, base)
    assert not [pair for pair in found if expected[pair] == 0.0]
    cells = {pair: num_rounds * share for pair, share in expected.items() if share > 0.0}
    assert sum((found[pair] - mean) ** 2 / mean for pair, mean in cells.items()) < 80


def history(*token_ids: int) -> History:
    return History(np.array(token_ids, np.int32), np.ones(len(token_ids), np.int32))


def joint(first: torch.Tensor, second: torch.Tensor, sampling: Sampling) -> dict[tuple[int, int], float]:
    """The law of two tokens of plain decoding; the presence penalty is the only processor before the warpers."""
    law = {}
    for one, share in enumerate(target_log_probs(first[None], [sampling])[0].exp().tolist()):
        scores = second[one].clone()
        scores[one] -= sampling.presence_penalty
        for other, rest in enumerate(target_log_probs(scores[None], [sampling])[0].exp().tolist()):
            law[one, other] = share * rest
    return law
