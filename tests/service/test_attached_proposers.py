"""Heads beside the target that draft chains: they are what the head says, and what is kept of a request is right."""

import pytest
from support.attached import NAMES, WITH_ROWS, RandomHeads, beside, dense_head

from specserve.service.features import FeaturePages
from specserve.service.messages import AttachedName, ProposeBatch, ProposeRow, Sampling, ScoreBatch, ScoreRow
from specserve.service.target import Target

GREEDY = Sampling()
REJECTING = Sampling(greedy=False, temperature=0.8, seed=11, acceptance="rejection")


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> RandomHeads:
    return RandomHeads(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("name", NAMES)
def test_a_draft_for_a_ratio_test_says_what_it_was_drawn_from_or_nothing(cell: RandomHeads, name: AttachedName) -> None:
    proposer, _ = beside(cell, name, 8, 4, trees=False)
    row = ProposeRow("a", 4, 0, (5, 6, 7, 8), 3, REJECTING, block_table=(2, 5))
    (draft,) = proposer.propose(ProposeBatch(0, name, (row,))).drafts
    assert (draft.support_ids is None) == (name == "medusa")  # its heads know nothing of each other's draws


@pytest.mark.parametrize("name", WITH_ROWS)
@pytest.mark.parametrize(("page_tokens", "table"), [(4, (9, 4, 17, 0, 30, 2, 11, 5)), (16, (3, 1))])
def test_a_draft_is_what_the_head_gives_on_the_whole_sequence_at_once(
    cell: RandomHeads, name: AttachedName, page_tokens: int, table: tuple[int, ...]
) -> None:
    """Rows kept over rounds, pages in any order, and what rejected drafts left behind change nothing; pages of 16 run
    on the kernels, others on the modules."""
    proposer, features = beside(cell, name, 32, page_tokens, trees=False)
    target = Target(cell.model, 32, page_tokens, features)
    tokens = [(5 * place) % 90 + 3 for place in range(23)]
    known = 0
    for committed_len, gamma in ((7, 3), (8, 4), (12, 2), (13, 3), (22, 4)):
        start = 0 if known == 0 else known - 1
        target.score(ScoreBatch(0, (ScoreRow("a", start, tuple(tokens[start : committed_len - 1]), 0, table),)))
        row = ProposeRow(
            "a", committed_len, known, tuple(tokens[known:committed_len]), gamma, GREEDY, block_table=table
        )
        (draft,) = proposer.propose(ProposeBatch(0, name, (row,))).drafts
        assert draft.token_ids == dense_draft(cell, name, features, table, tokens[:committed_len], gamma)
        known = committed_len
    assert proposer.propose(ProposeBatch(0, name, (), ("a",))).num_held_requests == 0


@pytest.mark.parametrize("name", NAMES)
def test_after_a_tree_the_head_reads_the_states_of_the_accepted_path(cell: RandomHeads, name: AttachedName) -> None:
    """The path 0, 2, 4 of a tree at position 6 lies at 6, 8 and 10; then at 6, 7 and 8, moved with the next batch."""
    tokens = [(5 * place) % 90 + 3 for place in range(14)]
    table = (9, 4, 17, 0, 30, 2, 11, 5)
    nodes = (tokens[6], 77, tokens[7], 78, tokens[8], 79)
    tree = ScoreRow("a", 6, nodes, 6, table, parents=(0, 0, 2, 2, 2), moved_from=())
    chain = ScoreRow("a", 6, tuple(tokens[6:9]), 3, table)
    drafts = []
    for after, moved_from in ((tree, (8, 10)), (chain, ())):
        proposer, features = beside(cell, name, 32, 4, trees=False)
        target = Target(cell.model, 32, 4, features)
        target.score(ScoreBatch(0, (ScoreRow("a", 0, tuple(tokens[:6]), 0, table),)))
        target.score(ScoreBatch(1, (after,)))
        row = ProposeRow("a", 10, 0, tuple(tokens[:10]), 3, GREEDY, block_table=table, moved_from=moved_from)
        found = [proposer.propose(ProposeBatch(1, name, (row,))).drafts[0].token_ids]
        target.score(ScoreBatch(2, (ScoreRow("a", 9, tuple(tokens[9:13]), 4, table, moved_from=moved_from),)))
        later = ProposeRow("b", 14, 0, tuple(tokens), 3, GREEDY, block_table=table)
        found.append(proposer.propose(ProposeBatch(2, name, (later,))).drafts[0].token_ids)
        drafts.append(found)
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize("name", NAMES)
def test_a_request_with_one_token_or_without_room_gets_no_draft(cell: RandomHeads, name: AttachedName) -> None:
    proposer, _ = beside(cell, name, 200, 4, trees=False)
    table = tuple(range(130))
    alone = ProposeRow("a", 1, 0, (5,), 3, GREEDY, block_table=table)
    full = ProposeRow("b", 510, 0, tuple(range(510)), 3, GREEDY, block_table=table)
    unknown = ProposeRow("c", 9, 4, (1, 2, 3, 4, 5), 3, GREEDY, block_table=table)
    rows = (alone,) if name == "medusa" else (alone, full, unknown)  # Medusa needs neither room nor the tokens
    assert proposer.propose(ProposeBatch(0, name, rows)).drafts == ()


def test_medusa_drafts_no_further_than_it_has_heads(cell: RandomHeads) -> None:
    proposer, _ = beside(cell, "medusa", 32, 4, trees=False)
    rows = tuple(
        ProposeRow(request_id, 4, 0, (5, 6, 7, 8), gamma, GREEDY, block_table=(2, 5))
        for request_id, gamma in (("a", 8), ("b", 2))
    )
    drafts = proposer.propose(ProposeBatch(0, "medusa", rows)).drafts
    assert [len(draft.token_ids) for draft in drafts] == [5, 2]


def dense_draft(
    cell: RandomHeads, name: AttachedName, features: FeaturePages, table: tuple[int, ...], tokens: list[int], gamma: int
) -> tuple[int, ...]:
    """The greedy draft by one dense causal forward a token, nothing kept."""
    logits = dense_head(
        name, cell.folders[name], cell.model, lambda taps: features.read(table, range(len(tokens) - 1), taps), tokens
    )
    drafted: tuple[int, ...] = ()
    while len(drafted) < gamma:
        drafted = (*drafted, int(logits(drafted).argmax()))
    return drafted
