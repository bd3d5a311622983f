"""A tree's nodes compute what the chains to them would, bit for bit in the kernels, and its accepted path is kept."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support.architectures import CONFIGS, loaded
from transformers import GPT2Config

from specserve.service.kernels.native import library
from specserve.service.messages import ScoreBatch, ScoreRow
from specserve.service.paged_model import PagedModel
from specserve.service.target import Target
from specserve.service.trees import paths

TABLE, OTHER = (3, 0, 5, 9), (1, 2, 7, 4)
TREES = {
    "levels": (0, 0, 1, 1, 2, 2, 5),
    "comb": (0, 0, 2, 2, 4, 4, 6, 6),
    "wide": (0,) * 12,
    "deep": (0, 0, 2, 3, 4, 5, 6, 7, 8),
}
needs_kernels = pytest.mark.skipif(library() is None, reason="no C++ compiler here")


def tokens(count: int, step: int) -> list[int]:
    return [step * place % 290 + 3 for place in range(count)]


def tree_row(parents: Sequence[int], start: int) -> ScoreRow:
    return ScoreRow("a", start, tuple(tokens(len(parents) + 1, 11)), len(parents) + 1, TABLE, tuple(parents))


def of_tree(model: PagedModel, parents: Sequence[int], start: int) -> torch.Tensor:
    """Return the hidden states of a tree's nodes, computed beside a chain of another request."""
    model.forward([ScoreRow("a", 0, tuple(tokens(start, 5)), 0, TABLE), ScoreRow("b", 0, (7, 8, 9), 0, OTHER)])
    company = ScoreRow("b", 3, (4, 5), 2, OTHER)
    return model.forward([company, tree_row(parents, start)])[2:]


def of_chains(model: PagedModel, parents: Sequence[int], start: int) -> torch.Tensor:
    """Return the last hidden state of every node's own chain."""
    nodes = tokens(len(parents) + 1, 11)
    found = []
    for path in paths(parents):
        chain = [*tokens(start, 5), *(nodes[node] for node in path)]
        model.forward([ScoreRow("a", 0, tuple(chain[:-1]), 0, TABLE)])
        found.append(model.forward([ScoreRow("a", len(chain) - 1, (chain[-1],), 1, TABLE)])[0])
    return torch.stack(found)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_kernels_give_every_node_the_bits_of_its_chain(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = PagedModel(loaded(tmp_path, CONFIGS[name], dtype), 10, 16)
    assert model.is_fused
    for start, parents in zip((30, 13, 16, 41), TREES.values(), strict=True):
        assert torch.equal(of_tree(model, parents, start), of_chains(model, parents, start))


@pytest.mark.parametrize("tree", TREES)
def test_the_modules_give_every_node_its_chains_hidden_state(tree: str, tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3)
    model = PagedModel(loaded(tmp_path, config, torch.float64), 10, 16, fused=False)
    for start in (5, 30):
        mine, chains = of_tree(model, TREES[tree], start), of_chains(model, TREES[tree], start)
        assert torch.allclose(mine, chains, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gemma2"])
def test_the_modules_mask_trees_under_a_sliding_window(name: str, tmp_path: Path) -> None:
    """Their norms are float32, so no bits are equal here."""
    model = PagedModel(loaded(tmp_path, CONFIGS[name], torch.float64), 10, 16, fused=False)
    for start, parents in zip((30, 13, 16, 41), TREES.values(), strict=True):
        mine, chains = of_tree(model, parents, start), of_chains(model, parents, start)
        assert torch.allclose(mine, chains, rtol=1e-4, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize(
    ("dtype", "page_tokens"),
    [(torch.bfloat16, 16), (torch.float64, 16), (torch.float64, 8)],
    ids=["bf16 kernels", "float64 kernels", "modules"],
)
@pytest.mark.parametrize("scored_twice", [False, True])
def test_after_its_rows_are_moved_an_accepted_path_is_a_chain(
    dtype: torch.dtype, page_tokens: int, scored_twice: bool, tmp_path: Path
) -> None:
    """The path 0, 2, 4, 6, 8 of the comb lies in slots 13, 15, 17, 19 and 21, and goes to 13 to 17."""
    model = loaded(tmp_path, CONFIGS["llama"], dtype)
    target, plain = (Target(model, 20, page_tokens) for _ in range(2))
    table = tuple(range(12, 6, -1))
    nodes, start = tokens(9, 11), 13
    context = ScoreRow("a", 0, tuple(tokens(start, 5)), 0, table)
    target.score(ScoreBatch(0, (context,)))
    target.score(ScoreBatch(1, (ScoreRow("a", start, tuple(nodes), 9, table, TREES["comb"]),)))
    after = ScoreRow("a", start + 5, (77, 78), 2, table, None, (15, 17, 19, 21))
    found = target.score(ScoreBatch(2, (after,)))
    if scored_twice:
        found = target.score(ScoreBatch(3, (after,)))
    plain.score(ScoreBatch(0, (context,)))
    plain.score(ScoreBatch(1, (ScoreRow("a", start, (nodes[0],), 1, table),)))
    plain.score(ScoreBatch(2, (ScoreRow("a", start + 1, tuple(nodes[n] for n in (2, 4, 6, 8)), 4, table),)))
    expected = plain.score(ScoreBatch(3, (ScoreRow("a", start + 5, (77, 78), 2, table),)))
    mine, theirs = (torch.from_numpy(features.hidden.astype("float64")) for features in (found, expected))
    if page_tokens == 16:
        assert torch.equal(mine, theirs)
    else:
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-5)
    assert len(mine) == 2
