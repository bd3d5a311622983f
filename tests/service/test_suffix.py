"""Suffix decoding: scores are those of a plain count over the text, scopes never meet, memory is bounded."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cells import FixedPlanner
from support.rounds import TokenRounds, answer, plain, started, token_engine

from specserve.service.messages import DraftBatch, ProposeBatch, ProposeRow, Sampling
from specserve.service.ports import CommittedOutput
from specserve.service.proposers.suffix import SharedTexts, SuffixLimits, SuffixProposer
from specserve.service.proposers.suffix_tree import BREAK, SuffixTree, branches
from specserve.service.requests import GenerationRequest
from specserve.service.trees import is_tree, paths

TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), min_size=1, max_size=4)


def places(text: Sequence[int], context: Sequence[int]) -> list[int]:
    size = len(context)
    return [end for end in range(size, len(text) + 1) if list(text[end - size : end]) == list(context)]


def by_counting(text: Sequence[int], context: Sequence[int], limit: int, min_chance: float) -> list[float]:
    """Return the chances of the `limit` likeliest tokens after `context`, counting in the whole text."""
    chosen: list[float] = []
    left: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
    while left and len(chosen) <= limit:
        left.sort()
        chance, path = left.pop()
        chosen.append(chance)
        here = places(text, [*context, *path])
        follows = [text[end] for end in here if end < len(text) and text[end] != BREAK]
        shares = {token: chance * follows.count(token) / len(here) for token in set(follows)}
        left.extend((share, (*path, token)) for token, share in shares.items() if share >= min_chance)
    return chosen[1:]


@settings(max_examples=150, deadline=None)
@given(texts=TEXTS, depth=st.integers(1, 12))
def test_every_ending_is_found_where_it_occurs(texts: list[list[int]], depth: int) -> None:
    """The tree is read after every text, so that places arrive at nodes that have children already."""
    tree = SuffixTree(depth)
    for text in texts:
        tree.extend([*text, BREAK])
        for context in texts:
            found = dict(tree.occurrences(context))
            brute = {size: places(tree.token_ids, context[-size:]) for size in range(1, min(depth, len(context)) + 1)}
            longest_of = {tuple(ends): size for size, ends in brute.items() if ends}
            assert found == {size: list(ends) for ends, size in longest_of.items()}


@settings(max_examples=100, deadline=None)
@given(text=st.lists(st.integers(0, 3), min_size=2, max_size=60), gamma=st.integers(1, 9))
def test_a_guess_holds_the_likeliest_tokens_by_a_count_of_the_whole_text(text: list[int], gamma: int) -> None:
    tree = SuffixTree(8)
    tree.extend(text)
    for length, ends in tree.occurrences(text):
        guess = branches(tree.token_ids, ends, gamma, 0.1)
        expected = by_counting(text, text[-length:], gamma, 0.1)
        assert len(guess.token_ids) == len(expected)
        assert guess.score == pytest.approx(sum(expected))
        parents = guess.parents if guess.parents is not None else tuple(range(len(guess.token_ids)))
        assert is_tree(parents, guess.token_ids)
        for path in paths(parents):
            assert places(text, [*text[-length:], *(guess.token_ids[node - 1] for node in path[1:])])


def ask(
    proposer: SuffixProposer, request_id: str, tokens: Sequence[int], gamma: int = 8, scope: str = "", known: int = 0
) -> tuple[int, ...] | None:
    row = ProposeRow(request_id, len(tokens), known, tuple(tokens[known:]), gamma, Sampling(), scope=scope)
    drafts = proposer.propose(ProposeBatch(0, "suffix", (row,))).drafts
    return drafts[0].token_ids if drafts else None


def test_a_request_is_continued_as_it_went_on_before() -> None:
    proposer = SuffixProposer()
    assert ask(proposer, "a", [1, 2, 3, 4, 5, 9, 8, 7, 6, 1, 2]) == (3, 4, 5, 9), "two matched, so four are guessed"
    assert ask(proposer, "a", [1, 2, 3, 4, 5, 9, 8, 7, 6, 1, 2, 3, 4], known=11) == (5, 9, 8, 7, 6, 1, 2, 3)
    assert ask(proposer, "b", [1, 2, 3, 4]) == ()


def test_the_commoner_continuation_wins_over_the_later_one() -> None:
    assert ask(SuffixProposer(), "a", [1, 2, 5, 1, 2, 5, 1, 2, 7, 1, 2], gamma=1) == (5,)
    assert ask(SuffixProposer(), "a", [1, 2, 5, 1, 2, 7, 1, 2], gamma=1) == (7,)


def test_a_text_that_went_on_in_several_ways_is_drafted_as_a_tree() -> None:
    row = ProposeRow("a", 14, 0, (1, 2, 5, 9, 1, 2, 5, 8, 1, 2, 7, 6, 1, 2), 4, Sampling())
    (draft,) = SuffixProposer().propose(ProposeBatch(0, "suffix", (row,))).drafts
    assert draft.token_ids == (5, 8, 9, 7)
    assert draft.parents == (0, 1, 1, 0), "the likelier branch first, whole"


def test_a_chain_follows_the_likeliest_way_alone() -> None:
    row = ProposeRow("a", 14, 0, (1, 2, 5, 9, 1, 2, 5, 8, 1, 2, 7, 6, 1, 2), 4, Sampling())
    (draft,) = SuffixProposer(SuffixLimits(chain=True)).propose(ProposeBatch(0, "suffix", (row,))).drafts
    assert draft.token_ids == (5, 8, 1, 2)
    assert draft.parents is None


def test_finished_outputs_help_requests_of_their_own_scope_alone() -> None:
    proposer = SuffixProposer()
    proposer.observe(CommittedOutput("x", (11, 12, 13, 14, 15)))
    assert ask(proposer, "a", [7, 11, 12], scope="x") == (13, 14, 15)
    assert ask(proposer, "b", [7, 11, 12], scope="y") == ()
    assert ask(proposer, "c", [7, 11, 12]) == ()
    proposer.observe(CommittedOutput("x", (13, 11, 12, 99)))
    assert ask(proposer, "d", [14, 15, 13, 11, 12], 1, "x") == (99,), "no context reaches from one output to the next"


def test_the_more_certain_of_both_trees_is_drafted() -> None:
    proposer = SuffixProposer()
    for _ in range(3):
        proposer.observe(CommittedOutput("", (1, 2, 3, 8, 8, 8)))
    assert ask(proposer, "a", [1, 2, 3, 4, 5, 6, 1, 2, 3], gamma=3) == (8, 8, 8)
    assert ask(proposer, "b", [1, 2, 3, 4] * 6 + [1, 2, 3]) == (4, 1, 2, 3, 4, 1, 2, 3), "a longer match expects more"


def test_what_was_lost_or_rewritten_is_asked_for_again() -> None:
    proposer = SuffixProposer()
    assert ask(proposer, "a", [1, 2, 3, 1, 2], known=3) is None, "the beginning never came"
    assert ask(proposer, "a", [1, 2, 3, 1, 2]) == (3, 1, 2)
    assert ask(proposer, "a", [5, 6, 7, 5, 6]) == (7, 5, 6), "another text under the same name"


def test_closed_requests_are_forgotten() -> None:
    proposer = SuffixProposer()
    ask(proposer, "a", [1, 2])
    answer = proposer.propose(ProposeBatch(1, "suffix", (), ("a",)))
    assert answer == DraftBatch(1, (), 0)


def test_memory_is_bounded_whatever_is_written() -> None:
    """What is read is sorted, which takes room that the next output pays for."""
    limits = SuffixLimits(shared_size=3000)
    shared, proposer = SharedTexts(limits), SuffixProposer(limits)
    for number in range(200):
        shared.learn(f"scope-{number % 7}", [number % 5] * 40)
        assert shared.size <= 3000
        assert all(list(tree.occurrences([number % 5] * 30)) for tree in shared.of(f"scope-{number % 7}"))
        proposer.observe(CommittedOutput("only", tuple(range(number, number + 50))))
        assert proposer.shared.size <= 3000
        assert ask(proposer, f"r{number}", [number, number + 1], scope="only") != ()
    assert shared.of("scope-3")


def test_an_output_is_remembered_until_half_the_room_is_filled_anew() -> None:
    proposer = SuffixProposer(SuffixLimits(shared_size=1000))
    proposer.observe(CommittedOutput("", (1, 2, 3, 4)))
    for start in range(100, 500, 40):
        assert ask(proposer, f"r{start}", [1, 2], 2) == (3, 4)
        proposer.observe(CommittedOutput("", tuple(range(start, start + 40))))
    for start in range(1000, 3000, 40):
        proposer.observe(CommittedOutput("", tuple(range(start, start + 40))))
    assert ask(proposer, "late", [1, 2], 2) == ()


def test_a_scope_used_lately_outlives_one_that_was_not() -> None:
    shared = SharedTexts(SuffixLimits(shared_size=100))
    shared.learn("old", range(30))
    shared.learn("used", range(30))
    assert shared.of("old")
    shared.learn("new", range(60))
    assert not shared.of("used")
    assert shared.of("old")
    shared.learn("large", range(200))
    assert shared.size == 0, "what does not fit alone is not kept"


@pytest.mark.parametrize(("salt", "helps"), [("", True), ("another", False)])
def test_a_request_that_nobody_drafted_for_helps_the_next_of_its_salt(salt: str, helps: bool) -> None:
    """The fake model's text never repeats itself, so what is accepted was learned from the first request."""
    planner = FixedPlanner(None, 0)
    first = GenerationRequest("first", (1, 2, 3), Sampling(), 30, ignore_eos=True)

    async def main() -> None:
        async with started(token_engine(TokenRounds(64, 4), planner, [SuffixProposer()])) as engine:
            await answer(engine, first)
            planner.proposer, planner.gamma = "suffix", 6
            second = await answer(engine, replace(first, request_id="second", cache_salt=salt))
        assert second.token_ids == plain((1, 2, 3), 30)

    asyncio.run(asyncio.wait_for(main(), 60))
    accepted = sum(outcome.num_accepted for outcome in planner.outcomes)
    assert accepted > 15 if helps else accepted < 5


def test_a_proposer_that_cannot_learn_costs_a_miss_and_no_request() -> None:
    class Forgetful(SuffixProposer):
        def observe(self, output: CommittedOutput) -> None:
            raise RuntimeError("never learns")

    async def main() -> None:
        async with started(token_engine(TokenRounds(64, 4), FixedPlanner("suffix", 3), [Forgetful()])) as engine:
            request = GenerationRequest("r", (1, 2, 3), Sampling(), 8, ignore_eos=True)
            assert (await answer(engine, request)).token_ids == plain((1, 2, 3), 8)
        assert engine.counters.missed["suffix"] == 1

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.skipif(find_spec("arctic_inference") is None, reason="arctic-inference is not installed")
def test_scores_are_arctic_inferences_but_for_ties() -> None:
    from arctic_inference.suffix_decoding import SuffixDecodingCache

    draw = random.Random(5)
    text = [draw.choice([1, 1, 1, 2, 2, 3]) for _ in range(400)]
    cache, tree = SuffixDecodingCache(max_tree_depth=64), SuffixTree(8)
    cache.start_request(0, text[:1])
    tree.extend(text[:1])
    same = 0
    for end in range(1, len(text)):
        theirs = cache.speculate(0, text[max(0, end - 9) : end], max_spec_tokens=8, use_tree_spec=True).score
        guesses = [branches(tree.token_ids, ends, min(8, size), 0.1) for size, ends in tree.occurrences(text[:end])]
        same += max(guess.score for guess in guesses) == pytest.approx(theirs)
        cache.add_active_response(0, text[end : end + 1])
        tree.extend(text[end : end + 1])
    assert same > 0.9 * len(text)
