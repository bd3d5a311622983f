"""Who gets into a round, with how much, and who gives way: the scheduler without any model."""

import random

import pytest

from specserve.service.engine import EngineConfig
from specserve.service.messages import Draft, Sampling
from specserve.service.requests import GenerationRequest
from specserve.service.running import RequestStream, Running
from specserve.service.scheduler import Scheduler, Turn, prompt_share
from specserve.service.stats import EngineStats

PAGE = 4


def scheduler(**limits: int) -> Scheduler:
    sizes = {"num_pages": 64, "page_tokens": PAGE, "prefill_tokens": 32, "prefill_tokens_busy": 8, **limits}
    return Scheduler(EngineConfig(max_model_len=512, vocab_size=50, eos_token_ids=(0,), **sizes), EngineStats())


def request(name: str, length: int, tier: str = "default", priority: int = 0, first: int = 1) -> Running:
    prompt = tuple(range(first, first + length))
    wanted = GenerationRequest(name, prompt, Sampling(), 64, tier=tier, priority=priority)
    return Running(wanted, RequestStream(name), 0.0, list(prompt))


def chunks(turns: list[Turn]) -> dict[str, tuple[int, int]]:
    return {turn.running.request.request_id: (turn.running.kv_len, turn.end) for turn in turns}


def play(book: Scheduler, turns: list[Turn], accepted: int = 0) -> None:
    """End the round: every sampled request commits one token and `accepted` more."""
    for turn in turns:
        book.row(turn, None)
        if turn.sampled:
            turn.running.token_ids.extend([7] * (1 + accepted))
            book.settle(turn.running, turn.running.committed_len - 1)
        else:
            book.settle(turn.running, turn.end)


def play_round(book: Scheduler) -> dict[str, tuple[int, int]]:
    book.admit(0.0)
    turns = book.schedule()
    shown = chunks(turns)
    play(book, turns)
    return shown


def test_the_share_of_prompts_shrinks_when_somebody_decodes_and_more_for_lower_tiers() -> None:
    limits = EngineConfig(512, 50, (0,), prefill_tokens=512, prefill_tokens_busy=128)
    priority, default, flex = 0, 1, 2
    assert prompt_share(limits, None, flex) == 512
    assert [prompt_share(limits, default, tier) for tier in (priority, default, flex)] == [128, 128, 64]
    assert [prompt_share(limits, priority, tier) for tier in (priority, default, flex)] == [128, 64, 64]
    tight = EngineConfig(512, 50, (0,), prefill_tokens=3, prefill_tokens_busy=128)
    assert prompt_share(tight, default, default) == 3
    assert prompt_share(EngineConfig(512, 50, (0,), prefill_tokens_busy=1), priority, flex) == 1


def test_chunks_end_with_pages_and_the_last_one_with_the_prompt() -> None:
    book = scheduler(prefill_tokens=10)
    book.add(request("a", 21))
    seen = [play_round(book)["a"] for _ in range(4)]
    assert seen == [(0, 8), (8, 16), (16, 21), (21, 22)]


def test_a_share_smaller_than_a_page_still_moves_on() -> None:
    book = scheduler(prefill_tokens=3)
    book.add(request("a", 9))
    assert [play_round(book)["a"] for _ in range(4)] == [(0, 3), (3, 4), (4, 7), (7, 9)]


def test_of_prompts_the_best_tier_is_served_first_with_one_chunk_a_request() -> None:
    book = scheduler(prefill_tokens=20)
    book.add(request("flex", 12, "flex", first=1))
    book.add(request("default", 12, "default", first=15))
    book.add(request("late", 12, "priority", 1, first=25))
    book.add(request("soon", 12, "priority", 0, first=35))
    assert play_round(book) == {"soon": (0, 12), "late": (0, 8)}
    assert play_round(book) == {"soon": (12, 13), "late": (8, 12)}
    assert play_round(book) == {"soon": (13, 14), "late": (12, 13), "default": (0, 4)}


def test_a_decoding_request_has_a_turn_in_every_round_whatever_prompts_wait() -> None:
    book = scheduler(max_running=40, num_pages=600)
    book.add(request("decoding", 2, "flex"))
    play_round(book)
    for index in range(30):
        book.add(request(f"p{index}", 40, "priority", first=index))
    for _ in range(60):
        book.admit(0.0)
        turns = book.schedule()
        assert any(turn.running.request.request_id == "decoding" and turn.decoding for turn in turns)
        assert sum(turn.end - turn.running.kv_len for turn in turns if not turn.decoding) <= 8
        play(book, turns)


def test_waiting_requests_enter_by_tier_then_priority_then_arrival() -> None:
    book = scheduler(max_running=1)
    names = ["d0", "f", "d-1", "p", "d0b"]
    for name, tier, priority in zip(
        names, ["default", "flex", "default", "priority", "default"], [0, -9, -1, 5, 0], strict=True
    ):
        book.add(request(name, 3, tier, priority))
    entered = []
    while book.num_waiting:
        book.admit(0.0)
        (turn,) = book.schedule()
        entered.append(turn.running.request.request_id)
        book.remove(turn.running)
    assert entered == ["p", "d-1", "d0", "d0b", "f"]


def test_admission_waits_for_free_pages_and_nobody_overtakes() -> None:
    book = scheduler(num_pages=10)
    book.add(request("first", 20))
    book.add(request("large", 20, first=25))
    book.add(request("small", 2, first=45))
    book.admit(0.0)
    assert (book.num_running, book.num_waiting) == (1, 2)
    first = book.find("first")
    assert first is not None
    book.remove(first)
    book.admit(0.0)
    assert (book.num_running, book.num_waiting) == (2, 0)


def test_pages_found_in_the_cache_and_in_use_count_for_admission() -> None:
    book = scheduler(num_pages=10)
    book.add(request("first", 20))
    play_round(book)
    book.add(request("twin", 20))
    book.admit(0.0)
    assert book.num_running == 2
    twin = book.find("twin")
    assert twin is not None
    assert (twin.kv_len, twin.num_cached_tokens) == (16, 16)


def test_committed_tokens_push_out_the_back_of_the_queue() -> None:
    book = scheduler(num_pages=4, max_running=3)
    for index, tier in enumerate(["default", "flex", "priority"]):
        book.add(request(tier, 3, tier, first=10 * index))
    play_round(book)
    assert (book.num_running, book.num_free_pages) == (2, 2)
    for _ in range(9):
        play_round(book)
    flex, default, priority = book.find("flex"), book.find("default"), book.find("priority")
    assert flex is not None
    assert default is not None
    assert priority is not None
    assert flex.table == []
    assert default.table == []
    assert default.kv_len == 0
    assert priority.kv_len == priority.committed_len - 1
    assert priority.committed_len == 13


def test_a_draft_takes_only_free_pages_and_is_cut_to_them() -> None:
    book = scheduler(num_pages=4, max_running=2)
    book.add(request("one", 3))
    play_round(book)
    book.add(request("two", 3, first=20))
    book.admit(0.0)
    turns = book.schedule()
    one, two = (turn.running for turn in turns)
    assert book.num_free_pages == 2
    assert book.grant(one, 9) == 8
    assert book.num_free_pages == 0
    assert book.grant(two, 8) == 1
    assert book.grant(two, 0) == 0
    assert len(book.row(turns[0], Draft("one", 4, (1,) * 8)).block_table) == 3
    play(book, turns)
    assert book.num_free_pages == 1
    assert book.num_running == 2


@pytest.mark.parametrize("committed", range(1, 10))
@pytest.mark.parametrize("gamma", range(9))
def test_a_granted_draft_always_fits_and_is_the_longest_that_does(committed: int, gamma: int) -> None:
    book = scheduler(num_pages=3, max_running=1)
    book.add(request("one", committed))
    book.admit(0.0)
    (turn,) = book.schedule()
    granted = book.grant(turn.running, gamma)
    assert granted == min(gamma, 3 * PAGE - committed)
    row = book.row(turn, Draft("one", committed, (1,) * granted))
    assert len(row.block_table) * PAGE >= committed + granted
    play(book, [turn])
    assert len(turn.running.table) <= (committed + 1 + PAGE - 1) // PAGE


def test_of_requests_with_the_same_prompt_one_computes_it() -> None:
    book = scheduler(prefill_tokens=64)
    for index in range(4):
        book.add(request(f"r{index}", 13))
    assert play_round(book) == {"r0": (0, 13)}
    assert play_round(book) == {"r0": (13, 14), "r1": (12, 13), "r2": (12, 13), "r3": (12, 13)}


def test_nobody_waits_for_a_page_that_could_not_be_shared() -> None:
    book = scheduler(prefill_tokens=64)
    for index in range(2):
        book.add(request(f"r{index}", PAGE))
    assert play_round(book) == {"r0": (0, PAGE), "r1": (0, PAGE)}


def test_without_prefix_caching_nothing_is_shared() -> None:
    book = scheduler(prefill_tokens=64, prefix_caching=False)
    for index in range(2):
        book.add(request(f"r{index}", 13))
    assert play_round(book) == {"r0": (0, 13), "r1": (0, 13)}


def test_a_preempted_request_finds_its_own_pages_again_and_does_not_call_them_cached() -> None:
    book = scheduler(num_pages=6, max_running=2)
    book.add(request("keeper", 3, "priority"))
    book.add(request("victim", 9, first=20))
    while (victim := book.find("victim")) is not None and not victim.restarted:
        play_round(book)
    keeper = book.find("keeper")
    assert keeper is not None
    book.remove(keeper)
    book.admit(0.0)
    assert victim is not None
    assert victim.kv_len > 0
    assert victim.num_cached_tokens == 0


def test_lost_kv_is_found_nowhere_and_every_page_is_free() -> None:
    book = scheduler()
    for index in range(3):
        book.add(request(f"r{index}", 13))
    play_round(book)
    play_round(book)
    book.forget_kv()
    assert book.num_free_pages == 64
    book.add(request("new", 13))
    book.admit(0.0)
    assert all(running.kv_len == 0 and running.table == [] for running in book.everyone())
    play_round(book)
    play_round(book)
    new = book.find("new")
    assert new is not None
    assert new.num_cached_tokens == 12


def test_ten_thousand_random_rounds_keep_the_books() -> None:
    """Every round has a turn, keeps to its share, and every request ends; at the end all pages are free."""
    draw = random.Random(1)
    book = scheduler(num_pages=24, max_running=6)
    arrived = 0
    for _ in range(10_000):
        if arrived < 3000 and draw.random() < 0.4 and book.num_waiting < 8:
            tier = draw.choice(["priority", "default", "flex"])
            book.add(request(f"r{arrived}", draw.randint(1, 40), tier, draw.randint(-1, 1), draw.randint(1, 3)))
            arrived += 1
        book.admit(0.0)
        if not book.num_running:
            continue
        turns = book.schedule()
        assert turns
        prompts = [turn for turn in turns if not turn.decoding]
        busy = len(prompts) < len(turns)
        assert sum(turn.end - turn.running.kv_len for turn in prompts) <= (8 if busy else 32)
        for turn in turns:
            book.grant(turn.running, draw.randint(0, 6) if turn.decoding else 0)
        play(book, turns, draw.randint(0, 2))
        for running in book.everyone():
            if running.committed_len > 60 or draw.random() < 0.02:
                book.remove(running)
    for running in book.everyone():
        book.remove(running)
    assert book.num_free_pages == 24
    assert (book.num_running, book.num_waiting) == (0, 0)
