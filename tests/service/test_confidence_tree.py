"""The dynamic tree against the paper's own procedure, and within its bounds whatever the head says."""

import random
from collections.abc import Callable
from functools import cache

import pytest
import torch
from support.trees import TokenPath, papers_tree, token_paths

from specserve.service.messages import Draft, ProposeRow, Sampling
from specserve.service.proposers.confidence_tree import ConfidenceTree, TreeLimits
from specserve.service.trees import is_chain, is_tree

VOCAB = 12
LogProbs = Callable[[TokenPath], torch.Tensor]


def random_head(seed: int, sharpness: float) -> LogProbs:
    """A head that says something else after every text."""

    @cache
    def log_probs(way: TokenPath) -> torch.Tensor:
        draw = random.Random(f"{seed} {way}")
        logits = [draw.gauss(0, sharpness) for _ in range(VOCAB)]
        return torch.tensor(logits, dtype=torch.float64).log_softmax(-1)

    return log_probs


def grown(log_probs: LogProbs, limits: TreeLimits, gamma: int) -> Draft:
    """The draft; no row may take the place of one that another still sees."""
    tree = ConfidenceTree(ProposeRow("a", 5, 0, (1, 2, 3, 4, 5), gamma, Sampling()), limits)
    fed: list[TokenPath] = [()]
    held: dict[int, TokenPath] = {0: ()}
    while not tree.complete:
        best = [log_probs(way).topk(min(limits.width, VOCAB)) for way in fed]
        tree.grow((found.indices.tolist(), found.values.tolist()) for found in best)
        nodes = tree.feed()
        fed = [(*fed[node.goes_on_from], node.token_id) for node in nodes]
        held |= {node.way[-1]: tokens for node, tokens in zip(nodes, fed, strict=True)}
        for node, tokens in zip(nodes, fed, strict=True):
            assert [held[place] for place in node.way] == [tokens[:depth] for depth in range(len(tokens) + 1)]
        assert max(held) <= gamma
    return tree.draft()


@pytest.mark.parametrize("sharpness", [0.5, 2.0, 5.0])
@pytest.mark.parametrize(("width", "depth", "gamma"), [(2, 3, 5), (3, 4, 9), (4, 5, 8), (8, 8, 16), (10, 6, 59)])
def test_the_tree_is_the_papers_although_hopeless_nodes_are_dropped_early(
    width: int, depth: int, gamma: int, sharpness: float
) -> None:
    for seed in range(20):
        head = random_head(seed, sharpness)
        draft = grown(head, TreeLimits(width, depth), gamma)
        assert token_paths(draft) == papers_tree(head, width, depth, gamma)


@pytest.mark.parametrize("sharpness", [0.0, 0.5, 2.0, 20.0, float("nan")])
@pytest.mark.parametrize("gamma", [1, 2, 5, 24])
def test_no_head_gets_more_nodes_or_levels_than_it_may(gamma: int, sharpness: float) -> None:
    for seed in range(5):
        for width, depth in ((1, 3), (3, 2), (8, 8), (20, 40)):
            draft = grown(random_head(seed, sharpness), TreeLimits(width, depth), gamma)
            assert draft.parents is not None
            assert is_tree(draft.parents, draft.token_ids)
            assert len(draft.token_ids) <= gamma
            assert draft.depth <= depth
            assert bool(draft.token_ids) == (sharpness == sharpness)


def test_a_certain_head_gets_a_chain_of_all_tokens() -> None:
    def certain(way: TokenPath) -> torch.Tensor:
        return torch.where(torch.arange(VOCAB) == len(way) % VOCAB, 0.0, -torch.inf).double()

    draft = grown(certain, TreeLimits(4, 20), 9)
    assert draft.token_ids == tuple(range(9))
    assert draft.parents is not None
    assert is_chain(draft.parents)


def test_the_likeliest_branch_comes_first_and_whole() -> None:
    head = random_head(3, 2.0)
    draft = grown(head, TreeLimits(4, 6), 14)
    way: TokenPath = ()
    for token in draft.token_ids:
        if token != int(head(way).argmax()):
            break
        way = (*way, token)
    assert way
    assert max((len(other) for other in token_paths(draft) if other[: len(way)] == way), default=0) == len(way)
