"""The embedded models in one process, float32: speculation changes no token of twenty prompts."""

from collections.abc import Iterator

import pytest
from support.identity import MAX_TOKENS, SEED, TEMPERATURE, TWENTY, WAYS

from specserve.deployments.llm import LLM
from specserve.service.messages import Sampling

SAMPLINGS = {"greedy": Sampling(), "seeded": Sampling(greedy=False, temperature=TEMPERATURE, seed=SEED)}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(dtype="float32") as made:
        yield made


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_twenty_prompts_get_plain_decodings_tokens_whatever_is_drafted(llm: LLM, sampling: Sampling) -> None:
    plain = llm.generate(TWENTY, max_tokens=MAX_TOKENS, sampling=sampling, mode="off", ignore_eos=True)
    assert all(done.summary.num_draft_tokens == 0 for done in plain)
    for proposer in ("prompt_lookup", "draft"):
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
