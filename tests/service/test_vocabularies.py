"""A draft model with another tokenizer reads the same text and drafts the target's tokens; the output stays exact."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from support.cells import VOCAB_SIZE, Cell, FixedPlanner, RandomPlanner, save_tiny_llama
from support.tokenizers import byte_level, sentence_piece
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specserve.service.errors import ModelUnsupportedError
from specserve.service.inline import InlineProposerPort
from specserve.service.messages import ProposeBatch, ProposeRow, Sampling
from specserve.service.models import embedded_dir, load_tokenizer
from specserve.service.ports import ProposerPort
from specserve.service.proposers.draft_model import DraftModelProposer
from specserve.service.requests import GenerationRequest
from specserve.service.target import Target
from specserve.service.vocabularies import SharedVocabulary, shared_vocabulary

GREEDY = Sampling()
SEEDED = Sampling(greedy=False, temperature=0.8, top_p=0.95, seed=11)
REJECTING = Sampling(greedy=False, temperature=0.8, seed=11, acceptance="rejection")
TEXTS = (
    "def add(a, b):\n    return a + b",
    "caf\N{LATIN SMALL LETTER E WITH ACUTE} \N{SNOWMAN}",
    "  two  spaces\n\n\ttab",
    "x",
)
KINDS = {"byte_level": byte_level, "sentence_piece": sentence_piece}


@pytest.fixture(scope="module")
def target_tokenizer() -> PreTrainedTokenizerFast:
    return load_tokenizer(embedded_dir("target"))


@pytest.fixture(scope="module", params=KINDS)
def draft_tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return KINDS[request.param](700)


@pytest.fixture(scope="module")
def shared(target_tokenizer: PreTrainedTokenizerFast, draft_tokenizer: PreTrainedTokenizerFast) -> SharedVocabulary:
    found = shared_vocabulary(target_tokenizer, draft_tokenizer, VOCAB_SIZE, len(draft_tokenizer))
    assert found is not None
    return found


@pytest.mark.parametrize("text", TEXTS)
def test_the_draft_model_reads_the_same_text(
    shared: SharedVocabulary,
    target_tokenizer: PreTrainedTokenizerFast,
    draft_tokenizer: PreTrainedTokenizerFast,
    text: str,
) -> None:
    token_ids = target_tokenizer.encode(text)
    assert shared.beginning(token_ids) == list(draft_tokenizer(text)["input_ids"])
    followed = [token for token_id in token_ids for token in shared.following([token_id])]
    assert draft_tokenizer.decode(followed) == text
    assert draft_tokenizer.decode(shared.following(token_ids)) == text


def test_shared_tokens_stand_for_the_same_text(
    shared: SharedVocabulary, target_tokenizer: PreTrainedTokenizerFast, draft_tokenizer: PreTrainedTokenizerFast
) -> None:
    eos = target_tokenizer.eos_token_id
    pairs = {target_id: shared.drafted([target_id])[0] for target_id in shared._target_ids.tolist() if target_id != eos}
    assert len(set(pairs.values())) == len(pairs) > 200
    for target_id, draft_id in pairs.items():
        assert target_tokenizer.decode([target_id]) == draft_tokenizer.decode([draft_id])
    assert shared.drafted([eos]) == [draft_tokenizer.eos_token_id]


def test_draft_probabilities_are_those_of_the_intersection_renormalised(shared: SharedVocabulary) -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 700, dtype=torch.float64)
    probs = shared.logits(logits).softmax(-1)
    own = logits.softmax(-1)[:, shared._draft_ids]
    assert (probs[:, shared._target_ids] - own / own.sum(-1, keepdim=True)).abs().max() < 1e-14
    assert probs.sum(-1).sub(1).abs().max() < 1e-12
    assert int((probs > 0).sum(-1)[0]) == shared.num_shared


def test_padding_makes_no_other_vocabulary_and_strangers_are_refused(target_tokenizer: PreTrainedTokenizerFast) -> None:
    assert shared_vocabulary(target_tokenizer, target_tokenizer, 4096, 4200) is None
    assert shared_vocabulary(target_tokenizer, target_tokenizer, 4096, 4000) is None
    with pytest.raises(ModelUnsupportedError, match="no token in common"):
        shared_vocabulary(target_tokenizer, sentence_piece(700), 4096, 3)


def save_draft(folder: Path, vocab_size: int, positions: int = 512) -> Path:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=positions, initializer_range=0.6, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


class ForeignDraftCell(Cell):
    """A cell whose draft model has a vocabulary of its own."""

    def __init__(self, folder: Path, shared: SharedVocabulary | None, vocab_size: int, positions: int = 512) -> None:
        super().__init__(
            save_tiny_llama(folder / "target", 1), draft=save_draft(folder / "draft", vocab_size, positions)
        )
        self.shared = shared

    def target(
        self, num_pages: int, page_tokens: int, ports: dict[str, ProposerPort], executor: ThreadPoolExecutor
    ) -> Target:
        proposer = DraftModelProposer(self.draft, VOCAB_SIZE, 512, 4, self.shared)
        ports["draft"] = InlineProposerPort(proposer, executor)
        return super().target(num_pages, page_tokens, ports, executor)


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory, shared: SharedVocabulary) -> ForeignDraftCell:
    return ForeignDraftCell(tmp_path_factory.mktemp("models"), shared, 700)


def requests(
    tokenizer: PreTrainedTokenizerFast, sampling: Sampling, count: int = 4, max_tokens: int = 20
) -> list[GenerationRequest]:
    prompts = [tuple(tokenizer.encode(TEXTS[index % 4] * (1 + index // 2))) for index in range(count)]
    return [
        GenerationRequest(f"r{index}", prompt, sampling, max_tokens, ignore_eos=True)
        for index, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(("count", "gamma"), [(1, 4), (8, 3)])
def test_output_is_plain_decodings(cell: ForeignDraftCell, sampling: Sampling, count: int, gamma: int) -> None:
    asked = requests(cell.tokenizer, sampling, count)
    plain = cell.run(FixedPlanner(None, 0), asked)
    planner = FixedPlanner("draft", gamma)
    done = cell.run(planner, asked)
    assert [one.token_ids for one in done] == [one.token_ids for one in plain]
    assert sum(outcome.num_drafted for outcome in planner.outcomes) > 0


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("limits", [{}, {"num_pages": 24}, {"prefill_tokens": 3}], ids=str)
def test_output_does_not_depend_on_company_preemption_or_chunks(
    cell: ForeignDraftCell, sampling: Sampling, limits: dict[str, int]
) -> None:
    asked = requests(cell.tokenizer, sampling, 6)
    alone = [cell.run(FixedPlanner(None, 0), [request])[0].token_ids for request in asked]
    together = cell.run(RandomPlanner(3), asked, **limits)
    assert [done.token_ids for done in together] == alone


def test_a_sampled_draft_passes_the_ratio_test_with_what_it_was_drawn_from(cell: ForeignDraftCell) -> None:
    planner = FixedPlanner("draft", 3)
    done = cell.run(planner, requests(cell.tokenizer, REJECTING))
    assert all(len(one.token_ids) == 20 for one in done)
    assert sum(outcome.num_drafted for outcome in planner.outcomes) > 0


def test_a_sampled_drafts_support_holds_shared_tokens_alone(cell: ForeignDraftCell) -> None:
    assert cell.shared is not None
    proposer = DraftModelProposer(cell.draft, VOCAB_SIZE, 512, 4, cell.shared)
    token_ids = tuple(cell.tokenizer.encode("def add(a, b)"))
    row = ProposeRow("a", len(token_ids), 0, token_ids, 3, REJECTING)
    (draft,) = proposer.propose(ProposeBatch(0, "draft", (row,))).drafts
    assert draft.support_ids is not None
    assert draft.support_probs is not None
    known = cell.shared._target_ids.numpy()
    assert np.isin(draft.support_ids[draft.support_probs > 0], known).all()
    assert np.isin(draft.token_ids, known).all()


def test_a_draft_context_shorter_than_the_targets_ends_the_drafts_and_nothing_else(
    tmp_path: Path, shared: SharedVocabulary
) -> None:
    short = ForeignDraftCell(tmp_path, shared, 700, positions=16)
    asked = requests(short.tokenizer, GREEDY, 4, max_tokens=40)
    plain = short.run(FixedPlanner(None, 0), asked)
    planner = FixedPlanner("draft", 3)
    done = short.run(planner, asked)
    assert [one.token_ids for one in done] == [one.token_ids for one in plain]
    assert {outcome.num_drafted for outcome in planner.outcomes if outcome.num_asked == 3} == {0, 3}


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE + 64, VOCAB_SIZE - 2000], ids=["wider", "narrower"])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, REJECTING], ids=["greedy", "seeded", "rejection"])
def test_padded_vocabularies_of_one_family_draft_for_each_other(
    tmp_path: Path, vocab_size: int, sampling: Sampling
) -> None:
    padded = ForeignDraftCell(tmp_path, None, vocab_size)
    asked = requests(padded.tokenizer, sampling)
    plain = padded.run(FixedPlanner(None, 0), asked)
    planner = FixedPlanner("draft", 3)
    done = padded.run(planner, asked)
    if sampling is not REJECTING:
        assert [one.token_ids for one in done] == [one.token_ids for one in plain]
    assert all(len(one.token_ids) == 20 for one in done)
    assert sum(outcome.num_drafted for outcome in planner.outcomes) > 0
