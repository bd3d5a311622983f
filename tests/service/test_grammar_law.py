"""The law tests for grammars: with drafts, valid or not, the output has the distribution of the target restricted to
what the grammar admits, position by position, to 1e-12.

The grammar's own judge is the finite list of its words, not the library.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
import torch
from support.grammars import letter_tokenizer
from support.laws import Law, Prefix, Table, output_law, random_table, table, target_law

from specserve.service.acceptance import ratio_test, walk_chain
from specserve.service.drafting import within_grammar
from specserve.service.grammar import Grammars, Matchers
from specserve.service.json_schema import grammar_text
from specserve.service.messages import Constraint, Draft, Sampling, VerifyRow
from specserve.service.sampling import target_log_probs
from specserve.service.verifier import within_grammars

EXACT = 1e-12
GAMMA = 2
LETTERS = ("a", "b", "ab")
END = 3
VOCAB = 4
LENGTH = 7
GRAMMAR = grammar_text('start: ("a" "b"?)? ("b" "a")* "a"')
WORDS = frozenset(head + "ba" * times + "a" for head in ("", "a", "ab") for times in range(LENGTH))
SAMPLED = Sampling(greedy=False, temperature=0.9)


@cache
def raw_logits(output: Prefix) -> torch.Tensor:
    seed = sum((token + 1) * (VOCAB + 1) ** place for place, token in enumerate(output))
    return 2 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def text(output: Prefix) -> str | None:
    """The output's text; None when something follows its end."""
    body = tuple(itertools.takewhile(lambda token: token != END, output))
    return "".join(LETTERS[token] for token in body) if set(output[len(body) :]) <= {END} else None


def admitted(output: Prefix) -> bool:
    said = text(output)
    if said is None:
        return False
    return said in WORDS if END in output else any(word.startswith(said) for word in WORDS)


def restricted(output: Prefix) -> torch.Tensor:
    """The target's own distribution, then restricted by the list of words and renormalised."""
    probs = (raw_logits(output) / SAMPLED.temperature).softmax(-1)
    kept = torch.tensor([float(admitted((*output, token))) for token in range(VOCAB)], dtype=torch.float64)
    return probs * kept / (probs * kept).sum() if kept.any() else probs


def conditional(output: Prefix) -> Table:
    return table(VOCAB, GAMMA + 1, lambda prefix: restricted(output + prefix).tolist())


@pytest.fixture(scope="module")
def matchers() -> Matchers:
    return Matchers(Grammars(letter_tokenizer(LETTERS), VOCAB, (END,)))


def row(output: Prefix, draft: Prefix, request_id: str = "r") -> VerifyRow:
    constraint = Constraint(GRAMMAR, output)
    return VerifyRow(request_id, 5 + len(output), SAMPLED, draft, None, None, None, constraint=constraint)


def decided(matchers: Matchers, output: Prefix, draft: Prefix) -> torch.Tensor:
    """The probabilities at the positions of a draft, between rows without a grammar, so that a wrong offset shows."""
    own = [raw_logits(output + draft[:place]) for place in range(len(draft) + 1)]
    logits = torch.stack([raw_logits((0,)), raw_logits((1,)), *own, raw_logits((2,))])
    before = logits.clone()
    free = VerifyRow("free", 9, SAMPLED, (1,), None, None, None)
    last = VerifyRow("last", 9, SAMPLED, (), None, None, None)
    allowed = within_grammars(logits, (free, row(output, draft), last), matchers)
    assert torch.equal(logits, before)
    assert torch.equal(allowed[[0, 1, -1]], logits[[0, 1, -1]])
    return target_log_probs(allowed[2:-1], [SAMPLED] * (len(draft) + 1)).exp()


def walked_law(rows: torch.Tensor, draft: Prefix, target: Table) -> Law:
    law: dict[Prefix, float] = {}
    for own in itertools.product(range(VOCAB), repeat=GAMMA + 1):
        weight = float(torch.stack([line[token] for line, token in zip(rows, own, strict=False)]).prod())
        emitted = walk_chain(draft, own[: len(draft) + 1])[1]
        weight /= VOCAB ** (GAMMA + 1 - len(rows))
        for tail in itertools.product(range(VOCAB), repeat=GAMMA + 1 - len(emitted)):
            tokens, share = emitted, weight
            for token in tail:
                share *= float(target(tokens)[token]) if tokens in target.rows else 0.0
                tokens = (*tokens, token)
            law[tokens] = law.get(tokens, 0.0) + share
    return Law(law)


OUTPUTS: list[Prefix] = [
    output for size in range(4) for output in itertools.product(range(VOCAB), repeat=size) if admitted(output)
]
DRAFTS: list[Prefix] = list(itertools.product(range(VOCAB), repeat=GAMMA))


def test_every_position_is_restricted_on_its_own_prefix(matchers: Matchers) -> None:
    checked = 0
    for output, draft in itertools.product(OUTPUTS, DRAFTS):
        rows = decided(matchers, output, draft)
        for place in range(GAMMA + 1):
            if admitted(output + draft[:place]):
                expected = restricted(output + draft[:place])
                torch.testing.assert_close(rows[place], expected, rtol=0, atol=EXACT)
                checked += 1
    assert checked > 2 * len(OUTPUTS) * len(DRAFTS) / 2


def worst_walk(rows: Callable[[Prefix, Prefix], torch.Tensor], cut: bool, matchers: Matchers) -> float:
    worst = 0.0
    for output in OUTPUTS:
        target = conditional(output)
        expected = target_law(target, GAMMA + 1)
        for draft in DRAFTS:
            if cut:
                matcher = matchers.at("r", Constraint(GRAMMAR, output))
                draft = within_grammar(Draft("r", 5, draft), matcher).token_ids
            worst = max(worst, walked_law(rows(output, draft), draft, target).distance(expected))
    return worst


@pytest.mark.parametrize("cut", [False, True])
def test_a_walk_over_any_draft_has_the_restricted_law(matchers: Matchers, cut: bool) -> None:
    assert worst_walk(lambda output, draft: decided(matchers, output, draft), cut, matchers) < EXACT


def one_behind(matchers: Matchers, output: Prefix, draft: Prefix) -> torch.Tensor:
    """A wrong verifier: each position is masked by the prefix of the one before."""
    masks = [
        matchers.at("r", Constraint(GRAMMAR, output)).mask(),
        *matchers.at("r", Constraint(GRAMMAR, output)).masks(draft),
    ]
    scores = torch.stack([raw_logits(output + draft[:place]) for place in range(len(draft) + 1)])
    scores.masked_fill_(~torch.from_numpy(np.stack(masks[:-1])), -torch.inf)
    return target_log_probs(scores, [SAMPLED] * len(scores)).exp()


def free_bonus(matchers: Matchers, output: Prefix, draft: Prefix) -> torch.Tensor:
    """A wrong verifier: the bonus token is not masked."""
    rows = decided(matchers, output, draft).clone()
    rows[-1] = (raw_logits(output + draft) / SAMPLED.temperature).softmax(-1)
    return rows


@pytest.mark.parametrize("wrong", [one_behind, free_bonus])
def test_a_late_mask_or_a_free_bonus_token_breaks_the_law(
    matchers: Matchers, wrong: Callable[[Matchers, Prefix, Prefix], torch.Tensor]
) -> None:
    assert worst_walk(lambda output, draft: wrong(matchers, output, draft), False, matchers) > 0.01


Cut = Callable[[Prefix, torch.Tensor, Matchers, Prefix], int]


def own_cut(draft: Prefix, q: torch.Tensor, matchers: Matchers, output: Prefix) -> int:
    ids = np.tile(np.arange(VOCAB, dtype=np.int32), (len(draft), 1))
    sampled = Draft("r", 5, draft, ids, q.numpy().astype(np.float32))
    kept = within_grammar(sampled, matchers.at("r", Constraint(GRAMMAR, output)))
    assert kept.support_ids is not None
    assert kept.support_probs is not None
    assert len(kept.support_ids) == len(kept.support_probs) == len(kept.token_ids)
    return len(kept.token_ids)


def cut_like_a_walk(draft: Prefix, q: torch.Tensor, matchers: Matchers, output: Prefix) -> int:
    return len(within_grammar(Draft("r", 5, draft), matchers.at("r", Constraint(GRAMMAR, output))).token_ids)


def worst_ratio(rule: Callable[..., tuple[int, tuple[int, ...]]], cut: Cut, matchers: Matchers) -> float:
    return max(distance_of_ratio(rule, cut, matchers, output) for output in OUTPUTS[:6])


def distance_of_ratio(
    rule: Callable[..., tuple[int, tuple[int, ...]]], cut: Cut, matchers: Matchers, output: Prefix
) -> float:
    target, draft_table = conditional(output), random_table(VOCAB, GAMMA + 1, 3 + len(output))
    known: dict[Prefix, tuple[int, torch.Tensor]] = {}

    def cut_rule(
        draft: Prefix, p: torch.Tensor, q: torch.Tensor, accept: Sequence[float], residuals: Sequence[float]
    ) -> tuple[int, tuple[int, ...]]:
        if draft not in known:
            length = cut(draft, q, matchers, output)
            known[draft] = (length, decided(matchers, output, draft[:length]))
        length, rows = known[draft]
        return rule(draft[:length], rows, q[:length], accept, residuals)

    law = output_law(cut_rule, target, draft_table, GAMMA)
    return law.distance(target_law(target, GAMMA + 1))


def test_a_ratio_test_over_drafts_cut_after_the_forbidden_token_has_the_restricted_law(matchers: Matchers) -> None:
    assert worst_ratio(ratio_test, own_cut, matchers) < EXACT


def test_a_ratio_test_over_drafts_cut_before_it_is_biased(matchers: Matchers) -> None:
    assert worst_ratio(ratio_test, cut_like_a_walk, matchers) > 0.01
