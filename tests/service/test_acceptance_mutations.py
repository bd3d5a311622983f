"""Plausible mistakes in the acceptance rule, one by one: the law checker must see each of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from support.laws import Law, Round, Rule, Table, output_law, random_table, sampled, table, target_law

from specserve.service.acceptance import inverse_cdf, ratio_test, residual

GAMMA = 2
Emitted = tuple[int, tuple[int, ...]]


def passes(u: float, p: float, q: float) -> bool:
    return u * q < p


def normalized(weights: torch.Tensor, fallback: torch.Tensor) -> torch.Tensor:
    return weights / weights.sum() if float(weights.sum()) > 0.0 else fallback


def one_token_quantile(probs: torch.Tensor, u: float) -> int:
    """The inverse CDF of weights taken as they are: what is missing to 1 falls to the last token."""
    return min(int(torch.searchsorted(probs.cumsum(-1), torch.tensor(u).double(), right=True)), len(probs) - 1)


@dataclass(frozen=True)
class Variant:
    """The rule as a few replaceable steps; the defaults are the right ones."""

    accepts: Callable[[float, float, float], bool] = passes
    corrects: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = residual
    draws: Callable[[torch.Tensor, float], int] = inverse_cdf
    bonus_row: int | None = -1
    row_shift: int = 0
    goes_on: bool = False
    repeats_draft: bool = False

    def __call__(
        self,
        draft: Sequence[int],
        p: torch.Tensor,
        q: torch.Tensor,
        accept: Sequence[float],
        residuals: Sequence[float],
    ) -> Emitted:
        gamma, kept = len(draft), []
        correction: int | None = None
        for index, token in enumerate(draft):
            row = min(index + self.row_shift, gamma)
            if self.accepts(accept[index], float(p[row, token]), float(q[index, token])):
                kept.append(token)
                continue
            correction = self.draws(self.corrects(p[row], q[index]), residuals[index])
            if self.repeats_draft:
                correction = token
            if not self.goes_on:
                return index, (*kept, correction)
            kept.append(correction)
        if correction is not None or self.bonus_row is None:
            return gamma, tuple(kept)
        return gamma, (*kept, self.draws(p[self.bonus_row], residuals[gamma]))


def argmax_scored_with_softmax(round_: Round) -> None:
    """Draft the best token, yet report the whole softmax as q."""
    while len(round_.token_ids) < round_.gamma:
        row = round_.draft(round_.token_ids)
        round_.rows.append(row)
        round_.token_ids.append(int(row.argmax()))


def sampled_scored_as_one_hot(round_: Round) -> None:
    """Draft by sampling, yet report a deterministic draft: lawful for each draft by itself, if wasteful."""
    sampled(round_)
    round_.rows = [
        torch.eye(len(row)).double()[token] for row, token in zip(round_.rows, round_.token_ids, strict=True)
    ]


def unlikely_tokens_dropped(round_: Round) -> None:
    """Cut the draft before a token because the token drawn is itself unlikely."""
    sampled(round_)
    for place, (row, token) in enumerate(zip(round_.rows, round_.token_ids, strict=True)):
        if float(row[token]) < 0.3:
            del round_.token_ids[place:], round_.rows[place:]
            return


def reported_at_another_temperature(round_: Round) -> None:
    """Draft from q, report q sharpened."""
    sampled(round_)
    round_.rows = [row**2 / (row**2).sum() for row in round_.rows]


def unlikely_tokens_kept_as_last(round_: Round) -> None:
    """Stop after an unlikely token, keeping it: allowed, as the decision hides nothing that was drawn."""
    sampled(round_)
    for place, (row, token) in enumerate(zip(round_.rows, round_.token_ids, strict=True)):
        if float(row[token]) < 0.3:
            del round_.token_ids[place + 1 :], round_.rows[place + 1 :]
            return


def tables(kind: str) -> tuple[Table, Table]:
    if kind == "forbidden":
        # Every draft token of probability zero is possible under q.
        return table(3, GAMMA + 1, lambda _: [0.0, 0.4, 0.6]), table(3, GAMMA + 1, lambda _: [0.4, 0.4, 0.2])
    return random_table(3, GAMMA + 1, 21), random_table(3, GAMMA + 1, 22)


def is_lawful(law: Law, target: Table) -> bool:
    return law.distance(target_law(target, GAMMA + 1)) <= 1e-6 and not law.forbidden


MUTANTS: dict[str, Variant] = {
    "accepts always": Variant(accepts=lambda u, p, q: True),
    "accepts never": Variant(accepts=lambda u, p, q: False),
    "accepts with p instead of p/q": Variant(accepts=lambda u, p, q: u < p),
    "accepts with min(1, q/p)": Variant(accepts=lambda u, p, q: u * p < q),
    "accepts with 1 - p/q": Variant(accepts=lambda u, p, q: not u * q < p),
    "accepts whenever p >= q, else never": Variant(accepts=lambda u, p, q: p >= q),
    "corrects from p": Variant(corrects=lambda p, q: p),
    "corrects from q": Variant(corrects=lambda p, q: q),
    "corrects from max(0, q - p)": Variant(corrects=lambda p, q: normalized((q - p).clamp(min=0.0), p)),
    "corrects from |p - q|": Variant(corrects=lambda p, q: normalized((p - q).abs(), p)),
    "does not normalise the residual": Variant(corrects=lambda p, q: (p - q).clamp(min=0.0), draws=one_token_quantile),
    "takes the bonus from the row before": Variant(bonus_row=-2),
    "takes the bonus from the first row": Variant(bonus_row=0),
    "tests against the next target row": Variant(row_shift=1),
    "goes on after a rejection": Variant(goes_on=True),
    "emits the rejected token as the correction": Variant(repeats_draft=True),
    "takes the likeliest correction": Variant(draws=lambda probs, u: int(probs.argmax())),
}

WRONG_DRAFTS = {
    "an argmax token scored with softmax q": argmax_scored_with_softmax,
    "a token dropped for its own low probability": unlikely_tokens_dropped,
    "q reported at another temperature": reported_at_another_temperature,
}


@pytest.mark.parametrize("rule", [ratio_test, Variant()], ids=["ratio_test", "unmutated variant"])
@pytest.mark.parametrize("kind", ["random", "forbidden"])
def test_the_right_rule_is_lawful_also_over_the_finer_branches(rule: Rule, kind: str) -> None:
    target, draft = tables(kind)
    assert is_lawful(output_law(rule, target, draft, GAMMA, fine=True), target)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutated_rule_is_caught(name: str) -> None:
    target, draft = tables("random")
    assert not is_lawful(output_law(MUTANTS[name], target, draft, GAMMA, fine=True), target)


@pytest.mark.parametrize("name", WRONG_DRAFTS)
def test_a_draft_that_misreports_what_it_sampled_is_caught(name: str) -> None:
    target, draft = tables("random")
    assert not is_lawful(output_law(ratio_test, target, draft, GAMMA, WRONG_DRAFTS[name], fine=True), target)


@pytest.mark.parametrize("drafting", [unlikely_tokens_kept_as_last, sampled_scored_as_one_hot])
def test_what_looks_like_a_mistake_but_is_lawful_is_not_flagged(drafting: Callable[[Round], None]) -> None:
    target, draft = tables("random")
    assert is_lawful(output_law(ratio_test, target, draft, GAMMA, drafting), target)


def test_a_non_strict_comparison_is_caught_because_zero_lets_a_forbidden_token_pass() -> None:
    target, draft = tables("forbidden")
    law = output_law(Variant(accepts=lambda u, p, q: u * q <= p), target, draft, GAMMA, fine=True)
    assert law.distance(target_law(target, GAMMA + 1)) < 1e-12, "the mistake has no weight: only its support shows it"
    assert law.forbidden
    assert not is_lawful(law, target)


def test_an_inverse_cdf_that_stops_at_the_quantile_is_caught_because_zero_draws_a_forbidden_token() -> None:
    def left(probs: torch.Tensor, u: float) -> int:
        return int(torch.searchsorted(probs.cumsum(-1), torch.tensor(u).double()))

    target, draft = tables("forbidden")
    law = output_law(Variant(draws=left), target, draft, GAMMA, fine=True)
    assert law.forbidden
    assert not is_lawful(law, target)


def test_sharing_the_noise_of_draft_and_residual_is_caught() -> None:
    target, draft = tables("random")
    assert not is_lawful(output_law(ratio_test, target, draft, GAMMA, fine=True, share_draft_noise=True), target)


def test_a_bonus_that_is_never_emitted_is_caught() -> None:
    """Dropping the bonus keeps the law, as the target continues; what it breaks is that a round must advance."""
    target, draft = tables("random")
    rule = Variant(bonus_row=None)
    assert is_lawful(output_law(rule, target, draft, GAMMA), target)
    for tested, advances in ((ratio_test, True), (rule, False)):
        num_accepted, emitted = tested(
            [2, 0], torch.eye(3).double()[[2, 0, 1]], torch.eye(3).double()[[2, 0]], [0.5, 0.5], [0.5, 0.5, 0.5]
        )
        assert (len(emitted) == num_accepted + 1) is advances
