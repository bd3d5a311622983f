"""The law tests for the processors: with drafts, the output has plain decoding's distribution to 1e-12.

The first round's state is what the engine's book says after committed rounds of one, two and three tokens; so by
induction every round after it has the law, too.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.laws import Law, Prefix, Table, continued, output_law, random_table, table, target_law
from support.processing import END, SMALL_VOCAB, Adjust, Decided, Processing, draft_of, plain_probs, raw_logits

from specserve.service import verifier
from specserve.service.acceptance import ratio_test, walk_chain
from specserve.service.history import TokenCounts
from specserve.service.messages import Sampling, VerifyRow
from specserve.service.running import Running
from specserve.service.sampling import adjust

EXACT = 1e-12
GAMMA = 2
SAMPLED = Sampling(greedy=False)
BIAS = ((0, -100.0), (2, 1.5))
CASES = {
    "repetition": Processing(replace(SAMPLED, repetition_penalty=1.7)),
    "repetition that rewards": Processing(replace(SAMPLED, repetition_penalty=0.6)),
    "presence": Processing(replace(SAMPLED, presence_penalty=1.2)),
    "frequency": Processing(replace(SAMPLED, frequency_penalty=0.9)),
    "bias": Processing(replace(SAMPLED, logit_bias=BIAS)),
    "min_tokens": Processing(SAMPLED, min_tokens=4),
    "everything": Processing(
        Sampling(
            greedy=False, temperature=0.8, top_k=3, top_p=0.9, min_p=0.05, repetition_penalty=1.4, presence_penalty=0.7,
            frequency_penalty=-0.4, logit_bias=BIAS,
        ),
        min_tokens=3,
    ),
}  # fmt: skip
COMMITTED: dict[str, tuple[Prefix, ...]] = {
    "nothing": (),
    "one token": ((2,),),
    "two tokens at once": ((2, 0),),
    "three rounds": ((1,), (2, 2, 0), (1,)),
}
Rows = Callable[[Running, Prefix], VerifyRow]


def own_rows(processing: Processing) -> Rows:
    return lambda running, draft: running.verify_row(draft_of(running, draft), processing.eos_token_ids)


def conditional(processing: Processing, output: Prefix) -> Table:
    """Plain decoding after `output`, as a table over what follows."""
    return table(SMALL_VOCAB, GAMMA + 1, lambda prefix: plain_probs(processing, output + prefix).tolist())


def walked_law(probs: Callable[[Prefix], torch.Tensor], draft: Prefix, target: Table) -> Law:
    """The law of a round of sample-and-walk whose positions have the distributions `probs(draft)`."""
    law: dict[Prefix, float] = defaultdict(float)
    rows = probs(draft)
    for own in itertools.product(range(SMALL_VOCAB), repeat=GAMMA + 1):
        weight = float(torch.stack([row[token] for row, token in zip(rows, own, strict=True)]).prod())
        emitted = walk_chain(draft, own)[1]
        for tokens, share in continued(target, emitted, GAMMA + 1):
            law[tokens] += weight * share
    return Law(dict(law))


def distance(decided: Decided, processing: Processing, rounds: tuple[Prefix, ...], rows: Rows | None = None) -> float:
    """The largest distance from plain decoding's law, over all deterministic drafts and one sampled one."""
    output = tuple(itertools.chain.from_iterable(rounds))
    target = conditional(processing, output)
    expected = target_law(target, GAMMA + 1)
    coupled = processing.running(*rounds)
    row = rows or own_rows(processing)
    worst = 0.0
    for draft in itertools.product(range(SMALL_VOCAB), repeat=GAMMA):
        law = walked_law(lambda tokens: decided.probs(row(coupled, tokens), output), draft, target)
        worst = max(worst, law.distance(expected))
    rejection = replace(processing, sampling=replace(processing.sampling, acceptance="rejection")).running(*rounds)
    known: dict[Prefix, torch.Tensor] = {}

    def rule(draft, p, q, accept, residuals):  # type: ignore[no-untyped-def]
        if draft not in known:
            known[draft] = decided.probs(row(rejection, draft), output)
        return ratio_test(draft, known[draft], q, accept, residuals)

    law = output_law(rule, target, random_table(SMALL_VOCAB, GAMMA + 1, 3), GAMMA)
    assert worst > EXACT or not law.forbidden
    return max(worst, law.distance(expected))


@pytest.mark.parametrize("committed", COMMITTED)
@pytest.mark.parametrize("case", CASES)
def test_a_round_with_drafts_has_plain_decodings_law(
    monkeypatch: pytest.MonkeyPatch, case: str, committed: str
) -> None:
    assert distance(Decided(monkeypatch), CASES[case], COMMITTED[committed]) < EXACT


@pytest.mark.parametrize("committed", COMMITTED)
@pytest.mark.parametrize("case", CASES)
def test_a_greedy_round_emits_what_plain_decoding_would(case: str, committed: str) -> None:
    processing = replace(CASES[case], sampling=replace(CASES[case].sampling, greedy=True))
    rounds = COMMITTED[committed]
    output = tuple(itertools.chain.from_iterable(rounds))
    running = processing.running(*rounds)
    for draft in itertools.product(range(SMALL_VOCAB), repeat=GAMMA):
        expected: Prefix = ()
        while len(expected) <= GAMMA and expected == draft[: len(expected)]:
            expected = (*expected, int(plain_probs(processing, output + expected).argmax()))
        (verdict,) = verifier.decide(raw(output, draft), (own_rows(processing)(running, draft),))
        assert verdict.token_ids == expected


def raw(output: Prefix, draft: Prefix) -> torch.Tensor:
    return torch.stack([raw_logits(output + draft[:place]) for place in range(len(draft) + 1)])


def test_where_only_the_end_is_left_min_tokens_yields() -> None:
    scores = torch.full((2, SMALL_VOCAB), -torch.inf, dtype=torch.float64)
    scores[:, END], scores[1, 0] = 1.0, 0.5
    row = VerifyRow("r", 3, Sampling(), (0,), None, None, None, barred_token_ids=(END,), num_barred=2)
    adjust(scores, row)
    assert scores[0].tolist() == [-torch.inf, -torch.inf, -torch.inf, 1.0]
    assert scores[1].tolist() == [0.5, -torch.inf, -torch.inf, -torch.inf]


class LastTokenOnly(TokenCounts):
    """Counts only the last token of each round."""

    def history(self, output_token_ids):  # type: ignore[no-untyped-def]
        self._num_counted = max(self._num_counted, len(output_token_ids) - 1)
        return super().history(output_token_ids)


class WithoutPrompt(TokenCounts):
    """Forgets the prompt."""

    def __init__(self, prompt_token_ids, sampling):  # type: ignore[no-untyped-def]
        super().__init__((), sampling)


class PromptAsOutput(TokenCounts):
    """Counts the prompt's tokens as if they were output."""

    def __init__(self, prompt_token_ids, sampling):  # type: ignore[no-untyped-def]
        super().__init__((), sampling)
        self._counts = {token: prompt_token_ids.count(token) for token in prompt_token_ids}


COUNTING = {
    "penalties see only the last accepted token of a round": ("frequency", LastTokenOnly),
    "repetition sees only the last accepted token of a round": ("repetition", LastTokenOnly),
    "repetition forgets the prompt": ("repetition", WithoutPrompt),
    "presence counts the prompt": ("presence", PromptAsOutput),
    "frequency counts the prompt": ("frequency", PromptAsOutput),
}


@pytest.mark.parametrize("name", COUNTING)
def test_a_mistake_in_counting_is_caught(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    case, counts = COUNTING[name]
    monkeypatch.setattr("specserve.service.running.TokenCounts", counts)
    assert distance(Decided(monkeypatch), CASES[case], ((2, 3),)) > 1e-6


def at_the_bonus_alone(scores: torch.Tensor, row: VerifyRow) -> None:
    adjust(scores[-1:], replace(row, draft_token_ids=()))


def on_the_committed_tokens_alone(scores: torch.Tensor, row: VerifyRow) -> None:
    for position in range(len(scores)):
        adjust(scores[position : position + 1], replace(row, draft_token_ids=(), num_barred=row.num_barred - position))


def on_the_token_itself(scores: torch.Tensor, row: VerifyRow) -> None:
    ahead = torch.cat([scores[:1], scores])
    adjust(ahead, replace(row, draft_token_ids=(*row.draft_token_ids, 0)))
    scores.copy_(ahead[1:])


def at_every_position_as_at_the_last(scores: torch.Tensor, row: VerifyRow) -> None:
    for position in range(len(scores)):
        whole = scores[position].expand(len(scores), -1).clone()
        adjust(whole, row)
        scores[position] = whole[-1]


def one_bar_too_many(scores: torch.Tensor, row: VerifyRow) -> None:
    adjust(scores, replace(row, num_barred=row.num_barred + 1))


ADJUSTING: dict[str, tuple[str, Adjust]] = {
    "bias at the bonus token alone": ("bias", at_the_bonus_alone),
    "penalties at the bonus token alone": ("frequency", at_the_bonus_alone),
    "presence without the draft's own tokens": ("presence", on_the_committed_tokens_alone),
    "frequency without the draft's own tokens": ("frequency", on_the_committed_tokens_alone),
    "repetition without the draft's own tokens": ("repetition", on_the_committed_tokens_alone),
    "a position that counts its own token": ("frequency", on_the_token_itself),
    "every position with the whole draft": ("presence", at_every_position_as_at_the_last),
    "the end barred for one token too many": ("min_tokens", one_bar_too_many),
}


@pytest.mark.parametrize("name", ADJUSTING)
def test_a_mistake_in_adjusting_is_caught(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    case, mutant = ADJUSTING[name]
    monkeypatch.setattr(verifier, "adjust", mutant)
    assert distance(Decided(monkeypatch), CASES[case], ((2, 0),)) > 1e-6


def rounds_counted(processing: Processing) -> Rows:
    def row(running: Running, draft: Prefix) -> VerifyRow:
        own = own_rows(processing)(running, draft)
        return replace(own, num_barred=processing.min_tokens - 1, barred_token_ids=(END,))

    return row


def first_position_barred(processing: Processing) -> Rows:
    def row(running: Running, draft: Prefix) -> VerifyRow:
        own = own_rows(processing)(running, draft)
        return replace(own, num_barred=min(own.num_barred, 1))

    return row


@pytest.mark.parametrize("mistaken", [rounds_counted, first_position_barred])
def test_min_tokens_counted_in_rounds_is_caught(
    monkeypatch: pytest.MonkeyPatch, mistaken: Callable[[Processing], Rows]
) -> None:
    processing = CASES["min_tokens"]
    assert distance(Decided(monkeypatch), processing, ((2, 0),), mistaken(processing)) > 1e-6
