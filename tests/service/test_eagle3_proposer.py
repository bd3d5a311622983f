"""The EAGLE-3 proposer in an engine: the tokens are plain decoding's whatever the head says; what it keeps is right."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.cells import VOCAB_SIZE, Cell, FixedPlanner, RandomPlanner, save_tiny_llama

from specserve.service.features import FeaturePages
from specserve.service.inline import InlineProposerPort
from specserve.service.messages import ProposeBatch, ProposeRow, Sampling, ScoreBatch, ScoreRow
from specserve.service.models import LoadedModel
from specserve.service.ports import ProposerPort
from specserve.service.proposers.eagle3 import attach_eagle3
from specserve.service.proposers.eagle3_head import Eagle3Config, Eagle3Head, save_eagle3
from specserve.service.requests import GenerationRequest
from specserve.service.target import Target

GREEDY = Sampling()
SEEDED = Sampling(greedy=False, temperature=0.8, top_p=0.95, seed=11)
REJECTING = Sampling(greedy=False, temperature=0.8, seed=11, acceptance="rejection")
LAYERS = 6


def save_head(folder: Path, model: LoadedModel, seed: int = 0) -> Path:
    """Write a random head for `model` that knows every second token."""
    torch.manual_seed(seed)
    hidden = model.config.hidden_size
    config = Eagle3Config(hidden, hidden, 4, 2, 8, 48, VOCAB_SIZE // 2, VOCAB_SIZE, (2, 3, 3))
    head = Eagle3Head(config)
    head.d2t.copy_(torch.arange(VOCAB_SIZE // 2))
    save_eagle3(head, folder, {})
    return folder


class EagleCell(Cell):
    """A cell whose target has a head beside it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(save_tiny_llama(folder / "target", 1, layers=LAYERS), draft=folder / "target")
        self.head = save_head(folder / "head", self.model)

    def target(
        self, num_pages: int, page_tokens: int, ports: dict[str, ProposerPort], executor: ThreadPoolExecutor
    ) -> Target:
        proposer, features = attach_eagle3(self.head, self.model, num_pages, page_tokens)
        ports[proposer.name] = InlineProposerPort(proposer, executor, needs_pages=True)
        return Target(self.model, num_pages, page_tokens, features)


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> EagleCell:
    return EagleCell(tmp_path_factory.mktemp("models"))


def requests(sampling: Sampling, count: int = 4, max_tokens: int = 20) -> list[GenerationRequest]:
    shared = tuple(range(40, 52))
    prompts = [
        shared[: 4 * (index % 4)] + tuple((7 * index + 3 * p) % 50 + 10 for p in range(1 + 3 * index))
        for index in range(count)
    ]
    return [
        GenerationRequest(f"r{index}", prompt, sampling, max_tokens, ignore_eos=True)
        for index, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("gamma", [1, 4])
def test_output_is_plain_decodings(cell: EagleCell, sampling: Sampling, gamma: int) -> None:
    plain = cell.run(FixedPlanner(None, 0), requests(sampling))
    planner = FixedPlanner("eagle3", gamma)
    done = cell.run(planner, requests(sampling))
    assert [one.token_ids for one in done] == [one.token_ids for one in plain]
    assert sum(outcome.num_drafted for outcome in planner.outcomes) > 0


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("limits", [{}, {"num_pages": 24}, {"prefill_tokens": 3}, {"max_running": 2}], ids=str)
def test_output_does_not_depend_on_company_preemption_or_chunks(
    cell: EagleCell, sampling: Sampling, limits: dict[str, int]
) -> None:
    alone = [cell.run(FixedPlanner(None, 0), [request])[0].token_ids for request in requests(sampling, 6)]
    together = cell.run(RandomPlanner(3), requests(sampling, 6), **limits)
    assert [done.token_ids for done in together] == alone


def test_a_sampled_draft_passes_the_ratio_test_with_what_it_was_drawn_from(cell: EagleCell) -> None:
    planner = FixedPlanner("eagle3", 3)
    done = cell.run(planner, requests(REJECTING))
    assert all(len(one.token_ids) == 20 for one in done)
    assert sum(outcome.num_drafted for outcome in planner.outcomes) > 0


def test_a_draft_is_what_the_head_gives_on_the_whole_sequence_at_once(cell: EagleCell) -> None:
    """Rows kept over rounds, pages in any order, and what rejected drafts left behind change nothing."""
    proposer, features = attach_eagle3(cell.head, cell.model, 32, 4)
    target = Target(cell.model, 32, 4, features)
    tokens = [(5 * place) % 90 + 3 for place in range(23)]
    table = (9, 4, 17, 0, 30, 2, 11, 5)
    known = 0
    for committed_len, gamma in ((7, 3), (8, 4), (12, 2), (13, 3), (22, 4)):
        start = 0 if known == 0 else known - 1
        target.score(ScoreBatch(0, (ScoreRow("a", start, tuple(tokens[start : committed_len - 1]), 0, table),)))
        new = tuple(tokens[known:committed_len])
        row = ProposeRow("a", committed_len, known, new, gamma, GREEDY, block_table=table)
        (draft,) = proposer.propose(ProposeBatch(0, "eagle3", (row,))).drafts
        assert draft.token_ids == dense_draft(cell, features, table, tokens[:committed_len], gamma)
        known = committed_len
    assert proposer.propose(ProposeBatch(0, "eagle3", (), ("a",))).num_held_requests == 0


def test_after_a_tree_the_head_reads_the_states_of_the_accepted_path(cell: EagleCell) -> None:
    """The path 0, 2, 4 of a tree at position 6 lies at 6, 8 and 10; then at 6, 7 and 8, moved with the next batch."""
    tokens = [(5 * place) % 90 + 3 for place in range(14)]
    table = (9, 4, 17, 0, 30, 2, 11, 5)
    nodes = (tokens[6], 77, tokens[7], 78, tokens[8], 79)
    tree = ScoreRow("a", 6, nodes, 6, table, parents=(0, 0, 2, 2, 2), moved_from=())
    chain = ScoreRow("a", 6, tuple(tokens[6:9]), 3, table)
    drafts = []
    for after, moved_from in ((tree, (8, 10)), (chain, ())):
        proposer, features = attach_eagle3(cell.head, cell.model, 32, 4)
        target = Target(cell.model, 32, 4, features)
        target.score(ScoreBatch(0, (ScoreRow("a", 0, tuple(tokens[:6]), 0, table),)))
        target.score(ScoreBatch(1, (after,)))
        row = ProposeRow("a", 10, 0, tuple(tokens[:10]), 3, GREEDY, block_table=table, moved_from=moved_from)
        found = [proposer.propose(ProposeBatch(1, "eagle3", (row,))).drafts[0].token_ids]
        next_row = ScoreRow("a", 9, tuple(tokens[9:13]), 4, table, moved_from=moved_from)
        target.score(ScoreBatch(2, (next_row,)))
        later = ProposeRow("b", 14, 0, tuple(tokens), 3, GREEDY, block_table=table)
        found.append(proposer.propose(ProposeBatch(2, "eagle3", (later,))).drafts[0].token_ids)
        assert found[1] == dense_draft(cell, features, table, tokens, 3)
        drafts.append(found)
    assert drafts[0] == drafts[1]


def test_a_request_with_one_token_or_without_room_gets_no_draft(cell: EagleCell) -> None:
    proposer, _ = attach_eagle3(cell.head, cell.model, 200, 4)
    table = tuple(range(130))
    alone = ProposeRow("a", 1, 0, (5,), 3, GREEDY, block_table=table)
    full = ProposeRow("b", 510, 0, tuple(range(510)), 3, GREEDY, block_table=table)
    unknown = ProposeRow("c", 9, 4, (1, 2, 3, 4, 5), 3, GREEDY, block_table=table)
    assert proposer.propose(ProposeBatch(0, "eagle3", (alone, full, unknown))).drafts == ()


def dense_draft(
    cell: EagleCell, features: FeaturePages, table: tuple[int, ...], tokens: list[int], gamma: int
) -> tuple[int, ...]:
    """The greedy draft by one dense causal forward a token, nothing kept."""
    proposer, _ = attach_eagle3(cell.head, cell.model, 8, 4)
    head = proposer._head
    embed = cell.model.trunk.get_input_embeddings()
    states = [head.fuse(features.read(features.slots(table, 0, len(tokens) - 1)))]
    drafted: list[int] = []
    for _ in range(gamma):
        hidden = torch.cat(states)
        embedded = embed(torch.tensor((tokens + drafted)[1:]))
        positions = torch.arange(len(hidden))

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            group = query.shape[1] // key.shape[1]
            scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(group, 1)) * query.shape[-1] ** -0.5
            scores = scores.masked_fill(~torch.ones(len(query), len(query), dtype=torch.bool).tril(), float("-inf"))
            return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value.repeat_interleave(group, 1))

        with torch.inference_mode():
            logits, out = head(hidden, embedded, positions, attend)
        drafted.append(int(head.target_ids(logits[-1].argmax())))
        states.append(out[-1:])
    return tuple(drafted)
