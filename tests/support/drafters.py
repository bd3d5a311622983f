"""Whole answers to compare, and three drafters that between them meet every boundary of a round: `scripted` is right
about 0, 1, ... gamma tokens in turn, `self` (the target drafts for itself) always, `garbage` never."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pytest

from specserve.service.messages import Draft, DraftBatch, FinishReason, ProposeBatch, TokenLogprob
from specserve.service.requests import GenerationRequest

from .cells import VOCAB_SIZE, Cell, Finished, FixedPlanner, Reckless

GAMMA = 4
DRAFTERS = ("scripted", "self", "garbage")
Known = Mapping[str, Sequence[int]]
"""What each request has said when it is over, prompt included; drafts may go on where the request ends."""


@dataclass(frozen=True)
class Answer:
    """What a client sees of one request."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    usage: tuple[int, int]
    logprobs: tuple[TokenLogprob, ...]


class Replay:
    """Drafts what each request is known to say, right for as many tokens as its name tells; then wrong."""

    def __init__(self, name: str, known: Known, vocab_size: int = VOCAB_SIZE) -> None:
        self.name = name
        self._known = known
        self._vocab_size = vocab_size

    def propose(self, batch: ProposeBatch) -> DraftBatch:
        drafts = []
        for row in batch.rows:
            known = self._known[row.request_id]
            num_right = batch.round % (row.gamma + 1) if self.name == "scripted" else 0
            tokens = []
            for place in range(row.gamma):
                at = row.committed_len + place
                right = known[at] if at < len(known) else 1
                tokens.append(right if place < num_right else (right + 1 + place) % self._vocab_size)
            drafts.append(Draft(row.request_id, row.committed_len, tuple(tokens)))
        return DraftBatch(batch.round, tuple(drafts), 0)


def seen(done: Finished) -> Answer:
    """Return what the client saw of a finished request."""
    last = done.steps[-1]
    assert last.summary is not None
    usage = (last.summary.prompt_tokens, last.summary.completion_tokens)
    logprobs = tuple(logprob for step in done.steps for logprob in step.logprobs)
    return Answer(done.text, done.token_ids, last.finish_reason, usage, logprobs)


def plain(cell: Cell, requests: Sequence[GenerationRequest], **limits: int) -> list[Answer]:
    """Return plain decoding's answers; their text and logprobs are checked against the tokens' number."""
    answers = [seen(done) for done in cell.run(FixedPlanner(None, 0), requests, **limits)]
    for request, answer in zip(requests, answers, strict=True):
        assert answer.usage == (len(request.prompt_token_ids), len(answer.token_ids))
        assert len(answer.logprobs) == (0 if request.num_logprobs is None else len(answer.token_ids))
    return answers


def known(cell: Cell, requests: Sequence[GenerationRequest], beyond: int = GAMMA + 2, **limits: int) -> Known:
    """Return what the requests would say if nothing ended them, `beyond` tokens further than they may go.

    Only those whose processors do not depend on where they end are known this way.
    """
    longer = [
        replace(r, max_tokens=r.max_tokens + beyond, stop=(), stop_token_ids=(), ignore_eos=True) for r in requests
    ]
    answers = plain(cell, longer, **limits)
    return {r.request_id: (*r.prompt_token_ids, *a.token_ids) for r, a in zip(requests, answers, strict=True)}


def drafted(
    cell: Cell,
    requests: Sequence[GenerationRequest],
    drafter: str,
    known: Known,
    gamma: int = GAMMA,
    **limits: int,
) -> list[Answer]:
    """Return the answers when `drafter` drafts `gamma` tokens a round, whatever room is left."""
    planner = Reckless("draft" if drafter == "self" else drafter, gamma)
    extra = [] if drafter == "self" else [Replay(drafter, known)]
    answers = [seen(done) for done in cell.run(planner, requests, extra, **limits)]
    accepted = [(outcome.num_accepted, outcome.num_drafted) for outcome in planner.outcomes if outcome.num_drafted]
    if drafter == "garbage":
        assert all(num == 0 for num, _ in accepted)
    return answers


def assert_same(answers: Sequence[Answer], expected: Sequence[Answer]) -> None:
    """Text, tokens, finish reason and usage are equal, log-probabilities to 1e-3."""
    for one, other in zip(answers, expected, strict=True):
        assert replace(one, logprobs=()) == replace(other, logprobs=())
        assert len(one.logprobs) == len(other.logprobs)
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-3)
            assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
            assert [value for _, value in mine.top] == pytest.approx([value for _, value in theirs.top], abs=1e-3)
