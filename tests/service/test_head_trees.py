"""Trees of heads beside the target: the paper's over many rounds, within what was asked for, and no token changes."""

import pytest
import torch
from support.attached import NAMES, WITH_ROWS, Headed, RandomHeads, beside, dense_head
from support.everybody import NUM_REQUESTS, SITUATIONS, Everybody, Rotating, check
from support.trees import TokenPath, papers_tree, token_paths

from specserve.service.messages import (
    AttachedName,
    Draft,
    Features,
    ProposeBatch,
    ProposeRow,
    Sampling,
    ScoreBatch,
    ScoreRow,
)
from specserve.service.proposers.confidence_tree import TreeLimits
from specserve.service.target import Target
from specserve.service.trees import depths, paths

GREEDY = Sampling()
SEEDED = Sampling(greedy=False, temperature=0.8, top_p=0.95, seed=11)
REJECTING = Sampling(greedy=False, temperature=0.8, seed=11, acceptance="rejection")
LIMITS = TreeLimits()


@pytest.fixture(scope="module")
def random_heads(tmp_path_factory: pytest.TempPathFactory) -> RandomHeads:
    return RandomHeads(tmp_path_factory.mktemp("models"))


def furthest_moved(draft: Draft) -> tuple[int, ...]:
    """The tokens on the way to the node that most of whose way lies elsewhere than a chain would."""
    assert draft.parents is not None
    ways = paths(draft.parents)[1:]
    best = max(ways, key=lambda way: (sum(node != depth for depth, node in enumerate(way)), way))
    return tuple(draft.token_ids[node - 1] for node in best[1:])


@pytest.mark.parametrize("name", WITH_ROWS)
@pytest.mark.parametrize("kind", ["random_heads", "everybody"])
@pytest.mark.parametrize(("page_tokens", "num_pages"), [(4, 20), (16, 5)])
def test_after_whatever_branch_was_accepted_the_tree_is_the_papers(
    kind: str, name: AttachedName, page_tokens: int, num_pages: int, request: pytest.FixtureRequest
) -> None:
    """The dense head keeps nothing, so what the proposer kept of accepted tokens, and not of others, is right. Pages of
    16 run on the kernels, others on the modules."""
    cell: Headed = request.getfixturevalue(kind)
    proposer, features = beside(cell, name, 32, page_tokens, trees=True)
    target = Target(cell.model, 32, page_tokens, features)
    tokens, table = [(5 * place) % 90 + 3 for place in range(7)], tuple((7 * n + 3) % 32 for n in range(num_pages))
    target.score(ScoreBatch(0, (ScoreRow("a", 0, tuple(tokens[:-1]), 0, table),)))
    known, moved_from, num_moved = 0, (), 0
    for number in range(1, 6):
        if len(tokens) + 9 > cell.model.shape.max_positions:
            break
        row = ProposeRow(
            "a", len(tokens), known, tuple(tokens[known:]), 9, GREEDY, block_table=table, moved_from=moved_from
        )
        (draft,) = proposer.propose(ProposeBatch(number, name, (row,))).drafts
        places = (*range(len(tokens) - 1 - len(moved_from)), *moved_from)
        head = dense_head(
            name, cell.folders[name], cell.model, lambda taps, at=places: features.read(table, at, taps), tokens
        )

        def log_probs(way: TokenPath, logits: object = head) -> torch.Tensor:
            return logits(way).log_softmax(-1)

        assert token_paths(draft) == papers_tree(log_probs, LIMITS.width, LIMITS.depth, 9)
        known = len(tokens)
        fed = (tokens[-1], *draft.token_ids)
        target.score(
            ScoreBatch(
                number, (ScoreRow("a", known - 1, fed, len(fed), table, parents=draft.parents, moved_from=moved_from),)
            )
        )
        committed = (*furthest_moved(draft), 5 + number)
        moved_from = draft.left_at(committed)
        num_moved += len(moved_from)
        tokens.extend(committed)
    assert num_moved >= 3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gamma", [1, 2, 7, 24])
def test_a_batch_of_trees_and_chains_stays_within_what_each_row_asked_for(
    random_heads: RandomHeads, name: AttachedName, gamma: int
) -> None:
    """Every row is drafted for as it would be alone, the sampled ones in chains."""
    tokens, samplings = (5, 6, 7, 8, 9, 10), (GREEDY, SEEDED, GREEDY, REJECTING)
    rows = [
        ProposeRow(f"r{n}", 6, 0, tokens, gamma + n, sampling, block_table=tuple(range(10 * n, 10 * n + 10)))
        for n, sampling in enumerate(samplings)
    ]
    proposer, _ = beside(random_heads, name, 40, 4, trees=True)
    drafts = proposer.propose(ProposeBatch(0, name, tuple(rows))).drafts
    for row, draft in zip(rows, drafts, strict=True):
        alone, _ = beside(random_heads, name, 40, 4, trees=True)
        (same,) = alone.propose(ProposeBatch(0, name, (row,))).drafts
        assert (draft.token_ids, draft.parents) == (same.token_ids, same.parents)
        assert (draft.parents is None) == (not row.sampling.greedy)
        assert 0 < len(draft.token_ids) <= row.gamma
        assert len(draft.token_ids) == row.gamma or draft.parents is None
        assert max(depths(draft.parents or ())) <= LIMITS.depth


@pytest.mark.parametrize(("count", "situation"), [(1, "plain"), *((NUM_REQUESTS, one) for one in SITUATIONS)])
@pytest.mark.parametrize("name", NAMES)
def test_large_trees_change_no_token(
    everybody: Everybody, name: str, count: int, situation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[int] = []
    score = Target.score

    def counted(target: Target, batch: ScoreBatch) -> Features:
        moved.extend(len(row.moved_from) for row in batch.rows)
        return score(target, batch)

    monkeypatch.setattr(Target, "score", counted)
    planner = Rotating([name], lengths=(9, 14))
    check(everybody, planner, [name], "greedy", count, situation)
    assert all(one.num_accepted <= one.num_drafted <= one.num_asked for one in planner.outcomes)
    assert count == 1 or sum(moved) > 0
