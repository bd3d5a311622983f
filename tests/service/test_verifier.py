"""The verifier hands every row to the rule that its request asks for, with that row's own numbers."""

import numpy as np
import pytest
import torch

from specserve.service.acceptance import block_test, expand_support, ratio_test
from specserve.service.messages import Acceptance, Sampling, VerifyRow
from specserve.service.noise import Role, uniform
from specserve.service.sampling import target_log_probs
from specserve.service.verifier import decide

VOCAB, GAMMA = 6, 3
RULES = {"rejection": ratio_test, "block": block_test}


def sampled_row(seed: int, acceptance: Acceptance) -> VerifyRow:
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(GAMMA, 4, generator=generator) ** 2 + 0.01
    probs /= probs.sum(-1, keepdim=True)
    ids = torch.stack([torch.randperm(VOCAB, generator=generator)[:4] for _ in range(GAMMA)])
    chosen = torch.multinomial(probs, 1, generator=generator)
    sampling = Sampling(greedy=False, temperature=0.9, seed=seed, acceptance=acceptance)
    tokens = tuple(int(token) for token in ids.gather(1, chosen)[:, 0])
    return VerifyRow("r", 11, sampling, tokens, ids.numpy().astype(np.int32), probs.numpy(), None)


@pytest.mark.parametrize("acceptance", RULES)
def test_a_sampled_chain_is_decided_by_the_rule_that_was_asked_for(acceptance: Acceptance) -> None:
    accepted = dict.fromkeys(RULES, 0)
    for seed in range(60):
        row = sampled_row(seed, acceptance)
        logits = torch.randn(GAMMA + 1, VOCAB, generator=torch.Generator().manual_seed(seed + 1000))
        assert row.support_ids is not None
        assert row.support_probs is not None
        draft_probs = expand_support(row.support_ids, row.support_probs, VOCAB).double()
        draft_probs /= draft_probs.sum(-1, keepdim=True)
        target_probs = target_log_probs(logits.double(), [row.sampling] * (GAMMA + 1)).exp()
        accept = [uniform(seed, 11 + place, Role.ACCEPT) for place in range(GAMMA)]
        residuals = [uniform(seed, 11 + place, Role.RESIDUAL) for place in range(GAMMA + 1)]
        outcomes = {
            name: rule(row.draft_token_ids, target_probs, draft_probs, accept, residuals)
            for name, rule in RULES.items()
        }
        (verdict,) = decide(logits, (row,))
        assert (verdict.num_accepted, verdict.token_ids) == outcomes[acceptance]
        for name, outcome in outcomes.items():
            accepted[name] += outcome[0]
    assert accepted["block"] > accepted["rejection"], "else this test could not tell the rules apart"
