"""The target drafting for itself: what it drafts is what its layers say, and its KV is never what drafts wrote."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from support.cells import save_yielding_llama
from transformers import GPT2Config, GPT2LMHeadModel

from specserve.service.errors import ModelUnsupportedError
from specserve.service.messages import ProposeBatch, ProposeRow, Sampling, ScoreBatch, ScoreRow
from specserve.service.models import LoadedModel, head_of, load_model
from specserve.service.proposers.self_draft import SelfDraftProposer, check_layers
from specserve.service.skipping import Skip, layers_from, read_skip, whole_layers
from specserve.service.target import Target

GREEDY = Sampling()
LAYERS = 6
SKIPS: Mapping[str, Skip] = {
    "layer_skip": Skip(frozenset({1, 2, 4}), frozenset({2, 5})),
    "early_exit": layers_from(4, LAYERS),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(save_yielding_llama(tmp_path_factory.mktemp("target"), LAYERS), torch.float64)


def draft_of(
    proposer: SelfDraftProposer, round_number: int, tokens: list[int], gamma: int, table: tuple[int, ...]
) -> tuple[int, ...] | None:
    row = ProposeRow("a", len(tokens), 0, tuple(tokens), gamma, GREEDY, block_table=table)
    drafts = proposer.propose(ProposeBatch(round_number, proposer.name, (row,))).drafts
    return drafts[0].token_ids if drafts else None


@torch.inference_mode()
def test_an_early_exit_draft_is_what_the_truncated_model_writes(model: LoadedModel, tmp_path: Path) -> None:
    """Its layers read the true KV of the context, which is what the truncated model would have made there itself."""
    target = Target(model, 16, 4)
    proposer = SelfDraftProposer("early_exit", target, head_of(model), layers_from(4, LAYERS), 4, 512)
    tokens, table = [(5 * place) % 90 + 3 for place in range(11)], (9, 4, 15, 0, 3)
    target.score(ScoreBatch(0, (ScoreRow("a", 0, tuple(tokens[:-1]), 0, table),)))
    whole = load_model(save_yielding_llama(tmp_path, LAYERS), torch.float64)
    whole.trunk.layers = whole.trunk.layers[:4]  # type: ignore[index]  # a ModuleList
    whole.config.num_hidden_layers = 4
    short = Target(whole, 16, 4)
    expected: list[int] = []
    head = head_of(model)
    for place in range(4):
        row = ScoreRow("a", 0, (*tokens, *expected), 1, table)
        expected.append(int(head(short.run_ahead(place, [row], Skip())).argmax()))
    assert draft_of(proposer, 1, tokens, 4, table) == tuple(expected)


def test_what_a_draft_wrote_is_gone_when_its_round_is_scored(model: LoadedModel) -> None:
    """The same rounds with and without drafts leave the same rows, bit for bit, wherever a request reads."""
    tokens, table = [(5 * place) % 90 + 3 for place in range(30)], (9, 4, 15, 0, 3, 1, 12, 7, 8)
    kept = []
    for drafting in (True, False):
        target = Target(model, 16, 4)
        proposer = SelfDraftProposer("layer_skip", target, head_of(model), SKIPS["layer_skip"], 4, 512)
        target.score(ScoreBatch(0, (ScoreRow("a", 0, tuple(tokens[:6]), 0, table),)))
        for number, (committed_len, num_scored) in enumerate(((7, 4), (10, 1), (11, 5), (15, 3)), 1):
            if drafting:
                assert draft_of(proposer, number, tokens[:committed_len], 4, table) is not None
            fed = tuple(tokens[committed_len - 1 : committed_len - 1 + num_scored])
            target.score(ScoreBatch(number, (ScoreRow("a", committed_len - 1, fed, 1, table),)))
        trunk = target._paged._trunk
        assert trunk is not None
        slots = torch.tensor([page * 4 + place for page in table for place in range(4)])[:17]
        kept.append(torch.stack([layer[slots] for layer in (*trunk._keys, *trunk._values)]))
    assert torch.equal(kept[0], kept[1])


def test_a_draft_that_comes_after_its_round_was_scored_is_not_computed(model: LoadedModel) -> None:
    target = Target(model, 16, 4)
    proposer = SelfDraftProposer("layer_skip", target, head_of(model), SKIPS["layer_skip"], 4, 512)
    tokens, table = [(5 * place) % 90 + 3 for place in range(11)], (9, 4, 15, 0, 3)
    target.score(ScoreBatch(5, (ScoreRow("a", 0, tuple(tokens[:-1]), 0, table),)))
    trunk = target._paged._trunk
    assert trunk is not None
    before = [layer.clone() for layer in trunk._keys]
    assert draft_of(proposer, 5, tokens, 3, table) is None
    assert all(torch.equal(one, other) for one, other in zip(before, trunk._keys, strict=True))
    assert draft_of(proposer, 6, tokens, 3, table) is not None


def test_a_row_without_room_or_its_last_token_or_with_rows_still_to_be_moved_gets_no_draft(
    model: LoadedModel,
) -> None:
    proposer = SelfDraftProposer("early_exit", Target(model, 200, 4), head_of(model), SKIPS["early_exit"], 4, 512)
    table = tuple(range(130))
    full = ProposeRow("a", 510, 0, tuple(range(510)), 3, GREEDY, block_table=table)
    untold = ProposeRow("b", 9, 9, (), 3, GREEDY, block_table=table)
    pageless = ProposeRow("c", 9, 0, tuple(range(9)), 4, GREEDY, block_table=(0, 1, 2))
    moving = ProposeRow("d", 9, 0, tuple(range(9)), 3, GREEDY, block_table=table, moved_from=(9,))
    assert proposer.propose(ProposeBatch(0, "early_exit", (full, untold, pageless, moving))).drafts == ()


def test_choices_that_no_target_can_make_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupportedError, match="layer 6 is skipped; this target has layers 0 to 5"):
        whole_layers([2, 6]).checked(LAYERS)
    with pytest.raises(ModelUnsupportedError, match="no layer is skipped"):
        Skip().checked(LAYERS)
    with pytest.raises(ModelUnsupportedError, match="all 6 layers are skipped"):
        whole_layers(range(6)).checked(LAYERS)
    with pytest.raises(ModelUnsupportedError, match="early_exit is 6; this target of 6 layers can leave after 1 to 5"):
        layers_from(6, LAYERS)
    GPT2LMHeadModel(
        GPT2Config(vocab_size=300, n_embd=16, n_layer=2, n_head=2, eos_token_id=0, bos_token_id=0)
    ).save_pretrained(tmp_path)
    with pytest.raises(ModelUnsupportedError, match="layers of gpt2 models cannot be skipped"):
        check_layers(load_model(tmp_path, torch.float32))


def test_a_file_of_skipped_layers_is_read_bare_or_under_a_models_name(tmp_path: Path) -> None:
    bare, named, wrong = tmp_path / "bare.json", tmp_path / "named.json", tmp_path / "wrong.json"
    bare.write_text('{"attention": [1, 3], "mlp": [2], "measured": {"gamma": 4}}')
    named.write_text('{"llama-2-13b": {"attention": [1, 3], "mlp": [2]}}')
    wrong.write_text('{"attention": [1.5], "mlp": [2]}')
    assert read_skip(bare) == read_skip(named) == Skip(frozenset({1, 3}), frozenset({2}))
    for path in (wrong, tmp_path / "none.json"):
        with pytest.raises(ModelUnsupportedError, match=path.name):
            read_skip(path)
