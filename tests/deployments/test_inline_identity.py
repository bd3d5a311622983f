"""The embedded models in one process: neither speculation nor company changes a token of twenty prompts."""

from collections.abc import Iterator

import pytest
from support.identity import MAX_TOKENS, SEED, TEMPERATURE, TWENTY, WAYS

from specserve.deployments.llm import LLM
from specserve.service.kernels.native import library
from specserve.service.messages import Sampling

SAMPLINGS = {"greedy": Sampling(), "seeded": Sampling(greedy=False, temperature=TEMPERATURE, seed=SEED)}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """bf16 rounds visibly, so there the rows of a forward must not depend on each other: the kernels' law."""
    if request.param == "bfloat16" and library() is None:
        pytest.skip("no C++ compiler here: without the kernels bf16 rows depend on their number")
    proposers = ("prediction", "prompt_lookup", "suffix", "draft", "layer_skip", "early_exit")
    with LLM(dtype=request.param, proposers=proposers, layer_skip=(3, 5), early_exit=6) as made:
        yield made


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_twenty_prompts_get_plain_decodings_tokens_whatever_is_drafted(llm: LLM, sampling: Sampling) -> None:
    plain = llm.generate(TWENTY, max_tokens=MAX_TOKENS, sampling=sampling, mode="off", ignore_eos=True)
    assert all(done.summary.num_draft_tokens == 0 for done in plain)
    for proposer in ("prompt_lookup", "suffix", "draft", "layer_skip"):
        num_accepted = 0
        for way in WAYS:
            drafted = llm.generate(
                TWENTY,
                max_tokens=MAX_TOKENS,
                sampling=sampling,
                mode=way.mode,
                max_draft_tokens=way.gamma,
                proposer=proposer,
                ignore_eos=True,
            )
            assert [done.token_ids for done in drafted] == [done.token_ids for done in plain], (proposer, str(way))
            num_accepted += sum(done.summary.num_accepted_tokens for done in drafted)
        assert num_accepted > 0


def test_a_prompt_alone_gets_the_tokens_it_gets_in_company(llm: LLM) -> None:
    together = llm.generate(TWENTY, max_tokens=MAX_TOKENS, ignore_eos=True)
    for prompt, done in list(zip(TWENTY, together, strict=True))[::3]:
        (alone,) = llm.generate([prompt], max_tokens=MAX_TOKENS, mode="off", ignore_eos=True)
        assert alone.token_ids == done.token_ids


def test_an_older_version_as_prediction_gives_plain_decodings_tokens_more_than_three_a_round(llm: LLM) -> None:
    num_tokens = num_rounds = 0
    for prompt in TWENTY[::7]:
        (plain,) = llm.generate([prompt], max_tokens=64, mode="off", ignore_eos=True)
        words = plain.text.split(" ")
        older = " ".join(["older" if place % 20 == 10 else word for place, word in enumerate(words)])
        (done,) = llm.generate(
            [prompt], max_tokens=64, mode="on", proposer="prediction", prediction=older, ignore_eos=True
        )
        assert done.token_ids == plain.token_ids
        num_tokens += len(done.token_ids)
        num_rounds += done.summary.num_rounds + 1
        assert 16 < (done.summary.accepted_prediction_tokens or 0) <= 64
    assert num_tokens / num_rounds > 3.0


@pytest.mark.parametrize("proposer", ["prompt_lookup", "suffix", "draft", "layer_skip", "early_exit"])
def test_drafts_are_as_good_after_a_cached_prefix(llm: LLM, proposer: str) -> None:
    def answers() -> tuple[float, int]:
        done = llm.generate(
            [f"# {proposer}\n{prompt}" for prompt in TWENTY[::3]],
            max_tokens=64, mode="on", proposer=proposer, max_draft_tokens=4, ignore_eos=True,
        )  # fmt: skip
        accepted, drafted = (
            sum(one.summary.num_accepted_tokens for one in done), sum(one.summary.num_draft_tokens for one in done)
        )  # fmt: skip
        return accepted / drafted, sum(one.summary.cached_tokens for one in done)

    cold, num_cached = answers()
    warm, num_cached_again = answers()
    assert num_cached_again > num_cached + 200
    assert cold > 0.1
    assert warm >= 0.9 * cold
