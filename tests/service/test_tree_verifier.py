"""The verifier on trees: every node has its own prefix, position and numbers; what is no tree is dropped."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.service import verifier
from specserve.service.drafting import straightened, well_formed
from specserve.service.messages import Draft, History, ProposeRow, Sampling, VerifyRow
from specserve.service.noise import Role, uniform
from specserve.service.sampling import adjust, target_log_probs
from specserve.service.trees import paths
from specserve.service.verifier import decide

VOCAB = 8
SEEDED = Sampling(greedy=False, temperature=0.9, seed=5)


def row(tokens: Sequence[int], parents: Sequence[int] | None, sampling: Sampling, **fields: object) -> VerifyRow:
    shape = None if parents is None else tuple(parents)
    return replace(VerifyRow("r", 11, sampling, tuple(tokens), None, None, None), parents=shape, **fields)


TREES = st.lists(st.integers(0, 1_000), min_size=1, max_size=9).map(
    lambda choices: tuple(choice % (node + 1) for node, choice in enumerate(choices))
)


@settings(max_examples=60, deadline=None)
@given(parents=TREES, seed=st.integers(0, 99), num_barred=st.integers(0, 4))
def test_every_node_is_processed_as_the_end_of_its_chain(parents: tuple[int, ...], seed: int, num_barred: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (len(parents),), generator=generator).tolist()
    sampling = Sampling(
        repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3, logit_bias=((2, 1.5), (5, -3.0))
    )
    history = History(np.array([1, 4], np.int32), np.array([2, 0], np.int32))
    fields = {"history": history, "barred_token_ids": (3, 6), "num_barred": num_barred}
    scores = torch.randn(len(parents) + 1, VOCAB, generator=generator, dtype=torch.float64)
    adjusted = scores.clone()
    adjust(adjusted, row(tokens, parents, sampling, **fields))
    for node, path in enumerate(paths(parents)):
        chain = scores[list(path)]
        adjust(chain, row([tokens[other - 1] for other in path[1:]], None, sampling, **fields))
        assert torch.equal(adjusted[node], chain[-1])


@settings(max_examples=60, deadline=None)
@given(parents=TREES, seed=st.integers(0, 99), greedy=st.booleans())
def test_a_tree_gives_the_tokens_that_the_chain_of_its_best_path_gives(
    parents: tuple[int, ...], seed: int, greedy: bool
) -> None:
    """The logits depend on the prefix alone, as a model's do; log-probabilities are those of the path's nodes."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, (len(parents),), generator=generator).tolist()
    sampling = replace(SEEDED, greedy=greedy, seed=seed)

    def logits(prefix: tuple[int, ...]) -> torch.Tensor:
        key = hash((seed, prefix)) % 2**31
        return torch.randn(3, generator=torch.Generator().manual_seed(key), dtype=torch.float64)

    prefixes = [tuple(tokens[node - 1] for node in path[1:]) for path in paths(parents)]
    known: dict[tuple[int, ...], int] = {}
    distinct = [node for node, prefix in enumerate(prefixes) if known.setdefault(prefix, node) == node]
    renumbered = {node: place for place, node in enumerate(distinct)}
    kept_tokens = [tokens[node - 1] for node in distinct[1:]]
    kept_parents = [renumbered[known[prefixes[node][:-1]]] for node in distinct[1:]]
    tree = replace(row(kept_tokens, kept_parents, sampling), num_logprobs=1)
    (verdict,) = decide(torch.stack([logits(prefixes[node]) for node in distinct]), (tree,))
    plain: tuple[int, ...] = ()
    logprobs = []
    while len(plain) < len(verdict.token_ids):
        chain = replace(row((), None, sampling), committed_len=11 + len(plain), num_logprobs=1)
        (one,) = decide(logits(plain)[None], (chain,))
        plain, logprobs = (*plain, *one.token_ids), [*logprobs, *one.logprobs]
    assert verdict.token_ids == plain
    assert list(verdict.logprobs) == logprobs
    assert plain[:-1] in known
    assert plain not in known, "the walk goes on while there is a node"


def drawn_siblings(seed: int, probs: torch.Tensor) -> list[int]:
    return torch.multinomial(probs, 3, generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_sampled_siblings_leave_the_targets_distribution(acceptance: str) -> None:
    """Three siblings drawn without replacement, 12000 seeds: a total variation above 0.037 has a chance below 1e-6."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(4, VOCAB, generator=generator, dtype=torch.float64)
    draft = torch.rand(VOCAB, generator=generator) ** 2 + 0.02
    draft /= draft.sum()
    support = np.tile(np.arange(VOCAB, dtype=np.int32), (3, 1))
    probs = np.tile(draft.numpy(), (3, 1))
    counts: Counter[int] = Counter()
    number = 12_000
    for seed in range(number):
        sampling = Sampling(greedy=False, seed=seed, acceptance=acceptance)  # type: ignore[arg-type]
        drafted = row(drawn_siblings(seed, draft), (0, 0, 0), sampling, support_ids=support, support_probs=probs)
        (verdict,) = decide(logits, (drafted,))
        counts[verdict.token_ids[0]] += 1
    target = target_log_probs(logits[:1], [Sampling(greedy=False)])[0].exp().tolist()
    distance = 0.5 * sum(abs(counts[token] / number - prob) for token, prob in enumerate(target))
    assert distance < 0.037


def test_siblings_are_tested_with_numbers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a number that rejected one would say something about the next: too little to show in a distribution."""
    read: list[list[float]] = []

    def spy(
        parents: Sequence[int], tokens: Sequence[int], p: object, q: object, accept: list[float], residuals: list[float]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        read.extend([accept, residuals])
        return (), (0,)

    monkeypatch.setattr(verifier, "recursive_rejection", spy)
    ids, probs = np.tile(np.arange(3, dtype=np.int32), (5, 1)), np.full((5, 3), 1 / 3, np.float32)
    sampling = Sampling(greedy=False, seed=9, acceptance="rejection")
    decide(
        torch.zeros(6, VOCAB), (row((0, 1, 2, 0, 1), (0, 0, 0, 1, 1), sampling, support_ids=ids, support_probs=probs),)
    )
    accept, residuals = read
    assert len(set(accept)) == 5
    assert not set(accept) & set(residuals)
    chain = [uniform(9, position, Role.ACCEPT) for position in (11, 12)]
    assert [accept[0], accept[3]] == chain, "first children draw the numbers that a chain would"


def asked(gamma: int, sampling: Sampling = SEEDED) -> ProposeRow:
    return ProposeRow("r", 11, 0, (), gamma, sampling)


@pytest.mark.parametrize(
    ("tokens", "parents", "gamma"),
    [((4, 5), (0, 2), 4), ((4, 4), (0, 0), 4), ((4, 5), (0,), 4), ((4, 5, 6), (0, 0, 1), 2), ((4, 99), (0, 0), 4)],
    ids=["a child before its parent", "twins", "a node without parent", "too many nodes", "no token"],
)
def test_what_is_no_tree_is_dropped(tokens: tuple[int, ...], parents: tuple[int, ...], gamma: int) -> None:
    assert not well_formed(Draft("r", 11, tokens, parents=parents), asked(gamma), VOCAB)


def test_siblings_that_claim_two_distributions_are_dropped() -> None:
    sampling = replace(SEEDED, acceptance="rejection")
    ids = np.array([[4, 5], [4, 5], [1, 2]], np.int32)
    probs = np.array([[0.4, 0.6], [0.4, 0.6], [0.5, 0.5]], np.float32)
    good = Draft("r", 11, (4, 5, 2), ids, probs, (0, 0, 1))
    assert well_formed(good, asked(4, sampling), VOCAB)
    bad = probs.copy()
    bad[1] = 0.6, 0.4
    assert not well_formed(replace(good, support_probs=bad), asked(4, sampling), VOCAB)


def test_a_tree_without_branches_is_a_chain() -> None:
    assert straightened(Draft("r", 11, (4, 5), parents=(0, 1))).parents is None
    assert straightened(Draft("r", 11, (4, 5), parents=(0, 0))).parents == (0, 0)
    assert Draft("r", 11, (4, 5, 6), parents=(0, 0, 2)).depth == 2
    assert Draft("r", 11, (4, 5, 6)).depth == 3
