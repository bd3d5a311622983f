"""Medusa heads: files as they are published, drafts against the paper's formula, what is refused."""

import itertools
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cells import save_tiny_llama
from support.heads import Tensors, bare_target, medusa_files, residual_medusa_files, write_head
from support.trees import token_paths
from transformers import AutoModelForCausalLM

from specserve.service.errors import ModelUnsupportedError
from specserve.service.messages import ProposeBatch, ProposeRow, Sampling, ScoreBatch, ScoreRow
from specserve.service.models import LoadedModel, head_of, load_model
from specserve.service.proposers.attached import attach
from specserve.service.proposers.medusa import MedusaHeads, load_medusa, save_medusa
from specserve.service.proposers.rank_tree import likeliest_tree, stated_accuracies
from specserve.service.target import Target
from specserve.service.trees import is_tree, paths

TOKENS = tuple((5 * place) % 90 + 3 for place in range(11))


def loaded(folder: Path, model: LoadedModel) -> MedusaHeads:
    return load_medusa(folder, model, head_of(model))


def reference(tensors: Tensors, head: int, state: torch.Tensor) -> torch.Tensor:
    """Head `head`'s logits for one hidden state."""
    inner = tensors[f"{head}.0.linear.weight"] @ state + tensors[f"{head}.0.linear.bias"]
    return tensors[f"{head}.1.weight"] @ (state + inner / (1 + torch.exp(-inner)))


def test_a_draft_is_every_heads_best_token_for_the_last_state(tmp_path: Path) -> None:
    model = load_model(save_tiny_llama(tmp_path / "target", 1, layers=3), torch.float64)
    folder, tensors = medusa_files(tmp_path / "heads", model)
    made, features = attach({"medusa": folder}, model, head_of(model), 8, 16, trees=False)
    Target(model, 8, 16, features).score(ScoreBatch(0, (ScoreRow("a", 0, TOKENS[:-1], 0, (4,)),)))
    row = ProposeRow("a", len(TOKENS), 0, TOKENS, 5, Sampling(), block_table=(4,))
    (draft,) = made["medusa"].propose(ProposeBatch(0, "medusa", (row,))).drafts
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float64)
    with torch.no_grad():
        state = whole.model(torch.tensor([TOKENS[:-1]])).last_hidden_state[0, -1]
    assert draft.token_ids == tuple(int(reference(tensors, head, state).argmax()) for head in range(5))


def test_a_tree_holds_the_tokens_of_its_ranks(tmp_path: Path) -> None:
    model = load_model(save_tiny_llama(tmp_path / "target", 1, layers=3), torch.float64)
    folder, tensors = medusa_files(tmp_path / "heads", model, num_heads=3)
    ranks = [[0.5, 0.2, 0.1], [0.4, 0.3, 0.1], [0.35, 0.0, 0.0]]
    write_head(folder, {"specserve_training": {"held_out_ranks": ranks}}, tensors, "medusa_lm_head.pt")
    made, features = attach({"medusa": folder}, model, head_of(model), 8, 16)
    assert features is not None
    Target(model, 8, 16, features).score(ScoreBatch(0, (ScoreRow("a", 0, TOKENS[:-1], 0, (4,)),)))
    rows = [ProposeRow("a", len(TOKENS), 0, TOKENS, gamma, Sampling(), block_table=(4,)) for gamma in (1, 4, 7)]
    drafts = [made["medusa"].propose(ProposeBatch(0, "medusa", (row,))).drafts[0] for row in rows]
    state = features.read((4,), (len(TOKENS) - 2,), (3,))[0]
    best = [reference(tensors, head, state).topk(3).indices.tolist() for head in range(3)]
    chances = {(0,): 0.5, (1,): 0.2, (0, 0): 0.2, (0, 1): 0.15, (2,): 0.1, (1, 0): 0.08, (0, 0, 0): 0.07, (1, 1): 0.06}
    for row, draft in zip(rows, drafts, strict=True):
        likeliest = list(chances)[: row.gamma]
        assert token_paths(draft) == {tuple(best[head][rank] for head, rank in enumerate(ranks)) for ranks in likeliest}


@pytest.mark.parametrize("num_nodes", [1, 2, 5, 12, 40])
def test_no_tree_of_as_many_nodes_is_expected_to_be_accepted_further(num_nodes: int) -> None:
    """The chances of all paths, sorted: none of the tree's own falls short."""
    draw = random.Random(num_nodes)
    accuracies = [sorted((draw.random() / 2 for _ in range(4)), reverse=True) for _ in range(3)]
    chances = {
        ranks: math.prod(accuracies[head][rank] for head, rank in enumerate(ranks))
        for depth in (1, 2, 3)
        for ranks in itertools.product(range(4), repeat=depth)
    }
    tree = likeliest_tree(accuracies, num_nodes)
    assert is_tree(tree.parents, tree.ranks)
    ways = [tuple(tree.ranks[node - 1] for node in path[1:]) for path in paths(tree.parents)[1:]]
    found = sorted((chances[way] for way in ways), reverse=True)
    assert found == pytest.approx(sorted(chances.values(), reverse=True)[:num_nodes])


def test_heads_that_were_never_measured_get_a_tree_that_is_wider_near_the_root() -> None:
    accuracies = stated_accuracies({}, 4)
    tree = likeliest_tree(accuracies, 16)
    per_head = [tree.heads.count(head) for head in range(4)]
    assert sum(per_head) == 16
    assert all(per_head)
    assert accuracies[0][0] > accuracies[1][0] > accuracies[3][0]


def test_training_that_measured_fewer_heads_than_there_are_says_nothing() -> None:
    stated = {"specserve_training": {"held_out_ranks": [[0.9, 0.05]]}}
    assert stated_accuracies(stated, 1) == ((0.9, 0.05),)
    assert stated_accuracies(stated, 2) == stated_accuracies({}, 2)


def test_what_is_known_of_best_tokens_alone_is_kept_and_no_other_rank_is_thought_better() -> None:
    (first, second) = stated_accuracies({"specserve_training": {"held_out_matches": [0.8, 0.2, 0.0]}}, 2)
    assert (first[0], second[0]) == (0.8, pytest.approx(0.25))
    for accuracies in (first, second):
        assert list(accuracies) == sorted(accuracies, reverse=True)
        assert sum(accuracies) <= 1


def as_medusa_2(tensors: Tensors) -> Tensors:
    """The same heads inside a whole model's file."""
    return {f"medusa_head.{name}": tensor for name, tensor in tensors.items()} | {
        "model.norm.weight": torch.ones(32),
        "lm_head.weight": torch.ones(40, 32),
    }


def as_vllm(tensors: Tensors) -> Tensors:
    """The same heads as vLLM spells them."""
    renamed = {}
    for name, tensor in tensors.items():
        head, layer, *rest = name.split(".")
        kind = rest[-1] if rest else "weight"
        renamed[f"blocks.{head}.layers.{layer}.{kind}" if "linear" in name else f"lm_heads.{head}.weight"] = tensor
    return renamed


@pytest.mark.parametrize(
    ("rename", "file"),
    [(dict, "medusa_lm_head.safetensors"), (as_medusa_2, "model.safetensors"), (as_vllm, "model.safetensors")],
)
def test_other_spellings_are_the_same_heads(tmp_path: Path, rename: Any, file: str) -> None:
    model = bare_target(40, 32, 3)
    folder, tensors = medusa_files(tmp_path / "a", model)
    theirs = loaded(write_head(tmp_path / "b", {}, rename(tensors), file), model)
    for name, tensor in loaded(folder, model).state_dict().items():
        assert torch.equal(theirs.state_dict()[name], tensor), name


def test_heads_of_two_blocks_keep_them_apart(tmp_path: Path) -> None:
    model = bare_target(40, 32, 3)
    _, tensors = medusa_files(tmp_path, model, num_heads=1)
    deeper = {"0.2.weight": tensors.pop("0.1.weight"), **tensors}
    deeper |= {name.replace("0.0.", "0.1."): 2 * tensor for name, tensor in tensors.items()}
    heads = loaded(write_head(tmp_path / "b", {}, deeper, "medusa_lm_head.pt"), model)
    state = torch.linspace(-1, 1, 32, dtype=torch.float64)
    for scale in (1, 2):
        inner = scale * (tensors["0.0.linear.weight"] @ state + tensors["0.0.linear.bias"])
        state = state + inner / (1 + torch.exp(-inner))
    start = torch.linspace(-1, 1, 32, dtype=torch.float64)
    assert torch.allclose(heads(start, 0), deeper["0.2.weight"] @ state, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda config, tensors: tensors.pop("1.1.weight"), "missing: medusa_head.1.1.weight"),
        (lambda config, tensors: tensors.pop("1.0.linear.bias"), "missing: medusa_head.1.0.linear.bias"),
        (lambda config, tensors: tensors.update(token_map=torch.zeros(4)), "unexpected: medusa_head.token_map"),
        (lambda config, tensors: tensors.update({"0.1.weight": torch.zeros(41, 32)}), "this target needs"),
        (lambda config, tensors: tensors.clear(), "has no Medusa heads"),
        (lambda config, tensors: config.update(vocab_size=41), "was made for 41 tokens"),
    ],
)
def test_heads_that_do_not_fit_are_refused_by_name(tmp_path: Path, change: Any, said: str) -> None:
    model = bare_target(40, 32, 3)
    _, tensors = medusa_files(tmp_path, model)
    config: dict[str, Any] = {}
    change(config, tensors)
    with pytest.raises(ModelUnsupportedError, match=said):
        loaded(write_head(tmp_path, config, tensors, "medusa_lm_head.pt"), model)


SHARING = {"original_lm_head": True}


@pytest.mark.parametrize("copy", [None, "lm_head.weight", "lm_heads.0.weight"])
def test_heads_that_share_the_targets_readout_are_its_head_over_their_blocks(tmp_path: Path, copy: str | None) -> None:
    model = bare_target(40, 32, 3)
    _, tensors = residual_medusa_files(tmp_path / "a", model)
    weight = model.head.weight
    assert isinstance(weight, torch.Tensor)
    repeated = {} if copy is None else {copy: weight.detach().clone()}
    heads = loaded(write_head(tmp_path / "b", SHARING, as_vllm(tensors) | repeated), model)
    state = torch.linspace(-1, 1, 32, dtype=torch.float64)[None]
    for head in range(2):
        own = tensors | {f"{head}.1.weight": weight}
        assert torch.allclose(heads(state, head)[0], reference(own, head, state[0]), atol=1e-12)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"lm_head.weight": torch.ones(40, 32)}, "unexpected: medusa_head.lm_head.weight"),
        ({"lm_heads.0.weight": torch.ones(40, 32)}, "unexpected: medusa_head.0.1.weight"),
        ({"1.1.weight": torch.ones(40, 32)}, "unexpected: medusa_head.1.1.weight"),
    ],
)
def test_heads_that_share_the_targets_readout_bring_no_other(tmp_path: Path, extra: Tensors, said: str) -> None:
    model = bare_target(40, 32, 3)
    _, tensors = residual_medusa_files(tmp_path / "a", model)
    with pytest.raises(ModelUnsupportedError, match=said):
        loaded(write_head(tmp_path / "b", SHARING, tensors | extra), model)


@pytest.mark.parametrize("files", [medusa_files, residual_medusa_files])
def test_what_is_saved_loads_as_the_same_heads(tmp_path: Path, files: Any) -> None:
    model = bare_target(40, 32, 3)
    heads = loaded(files(tmp_path / "a", model)[0], model)
    save_medusa(heads, tmp_path / "b", {"note": "kept"})
    again = loaded(tmp_path / "b", model)
    assert again.shared == heads.shared
    for name, tensor in heads.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor.to(torch.bfloat16).double()), name
