"""A policy that changes while requests run changes their drafts in the very next round, and no token."""

import asyncio

from support.rounds import Guessing, TokenRounds, answer, plain, started, token_engine

from specserve.deployments.planning import PolicyPlanner
from specserve.deployments.snapshot import CanaryShare, Governing, Silence, Snapshot
from specserve.policies.document import Policy, policy_from_dict
from specserve.service.messages import Sampling, ScoreBatch
from specserve.service.requests import GenerationRequest

PROMPTS = ([3, 4, 5], [7, 8], [9, 1, 2, 3])


def fixed(gamma: int) -> Policy:
    return policy_from_dict({"proposers": ["guessing"], "tiers": {"default": {"law": "fixed", "gamma": gamma}}})


def test_each_change_acts_in_the_next_round_of_running_requests_and_no_token_changes() -> None:
    planner = PolicyPlanner(fixed(2))
    active = Governing(1, fixed(2))
    changes = {
        10: (Snapshot((2, ()), Governing(2, fixed(5))), 5),
        20: (Snapshot((2, (1,)), Governing(2, fixed(5)), silences=(Silence(None),)), 0),
        30: (Snapshot((3, ()), Governing(3, fixed(1))), 1),
        40: (Snapshot((4, ()), active, canary=CanaryShare(Governing(4, fixed(4)), 100.0)), 4),
        50: (Snapshot((5, ()), active, shadow=Governing(4, fixed(4))), 2),
    }
    expected = 2
    drafted: list[tuple[int, int]] = []

    def change(batch: ScoreBatch) -> None:
        nonlocal expected
        drafted.extend((expected, row.num_sampled - 1) for row in batch.rows if row.start_position > 8)
        if batch.round in changes:
            snapshot, expected = changes[batch.round]
            planner.follow(snapshot, 0.0)

    async def main() -> None:
        engine = token_engine(TokenRounds(256, 4, before=change), planner, [Guessing(0.3)])
        async with started(engine):
            requests = [
                GenerationRequest(f"r{i}", tuple(prompt), Sampling(), 100, ignore_eos=True)
                for i, prompt in enumerate(PROMPTS)
            ]
            done = await asyncio.gather(*(answer(engine, request) for request in requests))
        assert [one.token_ids for one in done] == [plain(prompt, 100) for prompt in PROMPTS]
        summaries = [one.steps[-1].summary for one in done]
        assert [one.policy_version for one in summaries if one is not None] == [planner.policy_version] * 3

    asyncio.run(asyncio.wait_for(main(), 60))
    assert {wanted for wanted, _ in drafted} == {2, 5, 0, 1, 4}
    near_the_end = 8 * len(PROMPTS)
    assert all(wanted == got for wanted, got in drafted[:-near_the_end])
