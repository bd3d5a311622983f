"""No minute ever holds more than a key's limits, what is not used is given back, and waiting as told is enough."""

import math
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.deployments.credentials import ANYONE, Limits, Principal
from specserve.deployments.quotas import WINDOW_S, Quotas, Window
from specserve.deployments.usage import KeyUse, SharedUsage, Used
from specserve.service.errors import QuotaExceededError

TIMES = st.lists(st.floats(0, 30, allow_nan=False), min_size=1, max_size=60)


def principal(limits: Limits | None = None, priority: Limits | None = None) -> Principal:
    return Principal(
        "k", frozenset({"client"}), ("priority", "default"), "default", limits or Limits(), priority or Limits(), 0, "k"
    )


def wait(call: Callable[[], object]) -> float:
    """Return 0 when the call is admitted, and else the seconds it is told to wait."""
    try:
        call()
    except QuotaExceededError as refused:
        return refused.retry_after_s or -1.0
    return 0.0


@given(TIMES, st.integers(1, 7))
def test_no_minute_holds_more_requests_than_the_limit(gaps: list[float], most: int) -> None:
    quotas, caller = Quotas(), principal(Limits(requests_per_minute=most))
    now_s, admitted = 1000.0, []
    for gap in gaps:
        now_s += gap
        wait_s = wait(partial(quotas.count_request, caller, now_s))
        assert 0 <= wait_s <= WINDOW_S + 1
        if wait_s == 0:
            admitted.append(now_s)
        assert sum(now_s - WINDOW_S < then <= now_s for then in admitted) <= most


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 60), st.floats(0, 1)), max_size=40))
def test_no_minute_holds_more_tokens_than_the_limit(steps: list[tuple[float, int, float]]) -> None:
    most = 100
    quotas, caller = Quotas(), principal(Limits(tokens_per_minute=most))
    now_s, used = 0.0, []
    for gap, tokens, share in steps:
        now_s += gap
        try:
            lease = quotas.lease(caller, "default", tokens, 1, now_s)
        except QuotaExceededError:
            continue
        lease.settle(int(tokens * share), now_s)
        used.append((now_s, int(tokens * share)))
        assert sum(amount for then, amount in used if now_s - WINDOW_S < then <= now_s) <= most


@given(st.lists(st.tuples(st.floats(0, 15), st.integers(1, 50)), min_size=1, max_size=30), st.integers(1, 80))
def test_who_waits_as_told_is_admitted(steps: list[tuple[float, int]], tokens: int) -> None:
    quotas, caller = Quotas(), principal(Limits(tokens_per_minute=80))
    now_s = 0.0
    for gap, amount in steps:
        now_s += gap
        wait(partial(quotas.lease, caller, "default", amount, 1, now_s))
    wait_s = wait(partial(quotas.lease, caller, "default", tokens, 1, now_s))
    if wait_s > 0:
        quotas.lease(caller, "default", tokens, 1, now_s + math.ceil(wait_s))


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 9)), max_size=80))
def test_a_window_counts_what_its_seconds_hold(steps: list[tuple[float, int]]) -> None:
    window, now_s, events = Window(), 0.0, []
    for gap, amount in steps:
        now_s += gap
        window.add(amount, now_s)
        events.append((int(now_s), amount))
        assert window.used(now_s) == sum(n for second, n in events if int(now_s) - second <= WINDOW_S)
    assert len(window._seconds) <= WINDOW_S + 1
    assert window.used(now_s + math.ceil(window.reset_s(now_s))) == 0


def test_a_request_that_can_never_fit_is_told_not_to_wait() -> None:
    for limits, tokens, choices in ((Limits(tokens_per_minute=9), 10, 1), (Limits(max_concurrent=2), 1, 3)):
        with pytest.raises(QuotaExceededError) as refused:
            Quotas().lease(principal(limits), "default", tokens, choices, 0)
        assert refused.value.retry_after_s is None


def test_choices_are_bounded_until_they_are_settled() -> None:
    quotas, caller = Quotas(), principal(Limits(max_concurrent=3))
    lease = quotas.lease(caller, "default", 5, 2, 0)
    with pytest.raises(QuotaExceededError) as refused:
        quotas.lease(caller, "default", 5, 2, 0)
    assert refused.value.retry_after_s
    lease.settle(5, 0)
    lease.settle(5, 0)
    quotas.lease(caller, "default", 5, 3, 0)


def test_a_refused_lease_holds_nothing() -> None:
    quotas, caller = Quotas(), principal(Limits(tokens_per_minute=10, max_concurrent=2))
    for _ in range(3):
        with pytest.raises(QuotaExceededError):
            quotas.lease(caller, "priority", 11, 1, 0)
    quotas.lease(caller, "priority", 10, 2, 0)


def test_output_beyond_what_was_held_is_counted_when_it_is_known() -> None:
    quotas, caller = Quotas(), principal(Limits(tokens_per_minute=100))
    quotas.lease(caller, "default", 10, 1, 0).settle(90, 50)
    assert quotas.headers(caller, 50)["x-ratelimit-remaining-tokens"] == "10"
    assert quotas.headers(caller, 100)["x-ratelimit-remaining-tokens"] == "20"
    quotas.lease(caller, "default", 5, 1, 0).settle(500, 200)
    assert quotas.headers(caller, 200)["x-ratelimit-remaining-tokens"] == "0"


def test_what_is_given_back_late_is_not_counted_twice() -> None:
    quotas, caller = Quotas(), principal(Limits(tokens_per_minute=100))
    lease = quotas.lease(caller, "default", 60, 1, 0)
    quotas.lease(caller, "default", 60, 1, 61)
    lease.settle(1, 61.5)
    assert quotas.headers(caller, 62)["x-ratelimit-remaining-tokens"] == "40"


def test_priority_has_a_share_of_its_own() -> None:
    quotas, caller = Quotas(), principal(Limits(tokens_per_minute=100), Limits(tokens_per_minute=20))
    assert quotas.leaves_priority(caller, 20, 1, 0)
    quotas.lease(caller, "priority", 20, 1, 0)
    assert not quotas.leaves_priority(caller, 1, 1, 0)
    quotas.lease(caller, "default", 80, 1, 0)
    assert quotas.leaves_priority(caller, 20, 1, 61)


def test_headers_tell_of_the_limits_there_are() -> None:
    quotas, caller = Quotas(), principal(Limits(requests_per_minute=5))
    assert quotas.headers(caller, 0) == {
        "x-ratelimit-limit-requests": "5",
        "x-ratelimit-remaining-requests": "5",
        "x-ratelimit-reset-requests": "0.000s",
    }
    quotas.count_request(caller, 10.25)
    assert quotas.headers(caller, 10.5)["x-ratelimit-remaining-requests"] == "4"
    assert quotas.headers(caller, 10.5)["x-ratelimit-reset-requests"] == "60.500s"


def test_who_has_no_key_is_not_metered() -> None:
    quotas = Quotas()
    for _ in range(1000):
        quotas.count_request(ANYONE, 0)
        quotas.lease(ANYONE, "priority", 10**9, 100, 0)
    assert quotas.headers(ANYONE, 0) == {}


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 20), st.integers(1, 40)), max_size=60))
def test_cells_that_hear_of_each_other_keep_to_one_limit(steps: list[tuple[int, float, int]]) -> None:
    most, caller, shared = 100, principal(Limits(tokens_per_minute=100)), SharedUsage()
    cells, now_s, admitted = [Quotas(), Quotas(), Quotas()], 0.0, []
    for cell, gap, tokens in steps:
        now_s += gap
        for number in (0, 1, 2, cell):
            cells[number].hear(shared.exchange(f"cell-{number}", cells[number].report(now_s), now_s))
        if wait(partial(cells[cell].lease, caller, "default", tokens, 1, now_s)) == 0:
            admitted.append((now_s, tokens))
        assert sum(amount for then, amount in admitted if now_s - WINDOW_S < then <= now_s) <= most


def test_a_cell_hears_of_all_others_and_not_of_itself() -> None:
    shared, use = SharedUsage(), KeyUse(Used(1, 10, 2), Used(1, 5, 1))
    assert shared.exchange("a", {"k": use}, 0) == {}
    assert shared.exchange("b", {"k": use, "l": use}, 0) == {"k": use}
    assert shared.exchange("c", {}, 0) == {"k": use.plus(use), "l": use}


def test_a_silent_cells_choices_end_before_what_it_used_is_forgotten() -> None:
    shared = SharedUsage()
    shared.exchange("gone", {"k": KeyUse(Used(1, 10, 2), Used(0, 5, 2))}, 0)
    assert shared.exchange("here", {}, 4)["k"].everything.running == 2
    assert shared.exchange("here", {}, 6) == {"k": KeyUse(Used(1, 10, 0), Used(0, 5, 0))}
    assert shared.exchange("here", {}, 62) == {}


def test_what_is_used_elsewhere_counts_for_every_limit_and_ends_when_it_is_not_named_any_more() -> None:
    quotas = Quotas()
    caller = principal(Limits(requests_per_minute=5, tokens_per_minute=100, max_concurrent=3), Limits(max_concurrent=1))
    quotas.hear({"k": KeyUse(Used(5, 95, 3), Used(0, 0, 1))})
    assert wait(partial(quotas.count_request, caller, 0)) > 0
    assert wait(partial(quotas.lease, caller, "default", 1, 1, 0)) > 0
    assert not quotas.leaves_priority(caller, 1, 1, 0)
    assert quotas.headers(caller, 0)["x-ratelimit-remaining-tokens"] == "5"
    quotas.hear({})
    quotas.count_request(caller, 0)
    quotas.lease(caller, "priority", 100, 1, 0)
    assert quotas.report(0) == {"k": KeyUse(Used(1, 100, 1), Used(1, 100, 1))}
