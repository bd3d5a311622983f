"""The arrival rate follows a stream, its trend looks ahead, chance is no trend, and clocks may jump."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.policies.arrivals import (
    Arrivals,
    Crowd,
    arrival_rate,
    arrived,
    expected_crowd,
    expected_rate,
    running,
)

AHEAD_S = 2.0


def stream(times: list[float]) -> Arrivals:
    arrivals = Arrivals()
    for time_s in times:
        arrivals = arrived(arrivals, time_s)
    return arrivals


def rising(slope: float, until_s: float) -> list[float]:
    """Return evenly spaced arrivals of a rate that rises from nothing: the n-th comes when n of them are due."""
    return [(2.0 * n / slope) ** 0.5 for n in range(1, int(0.5 * slope * until_s**2) + 1)]


def test_the_arrival_rate_follows_a_steady_stream_and_fades() -> None:
    arrivals = stream([i * 0.1 for i in range(1000)])
    assert arrival_rate(arrivals, 100.0) == pytest.approx(10.0, rel=0.05)
    assert arrival_rate(arrivals, 200.0) < 0.01
    assert expected_rate(arrivals, 100.0, AHEAD_S) == pytest.approx(10.0, rel=0.05)


def test_on_a_ramp_the_forecast_is_nearer_to_what_comes_than_the_recent_rate_and_does_not_overshoot() -> None:
    arrivals = stream(rising(0.5, 60.0))
    coming = 0.5 * (60.0 + AHEAD_S)
    recent, expected = arrival_rate(arrivals, 60.0), expected_rate(arrivals, 60.0, AHEAD_S)
    assert recent == pytest.approx(0.5 * 50.0, rel=0.05)
    assert recent < expected <= coming
    assert coming - expected < 0.6 * (coming - recent)


def test_chance_is_rarely_taken_for_a_trend() -> None:
    """A normal variable exceeds two deviations in 4.6% of cases; seeded, so the count is what it is."""
    chance = random.Random(4)
    trends = 0
    for _ in range(300):
        now_s, times = 0.0, []
        while (now_s := now_s + chance.expovariate(3.0)) < 80.0:
            times.append(now_s)
        arrivals = stream(times)
        trends += abs(expected_rate(arrivals, 80.0, AHEAD_S) - arrival_rate(arrivals, 80.0)) > 1e-9
    assert trends <= 0.08 * 300


def test_requests_expected_at_once_are_the_rate_expected_times_how_long_they_stay() -> None:
    arrivals, crowd = Arrivals(), Crowd()
    for tick in range(1200):
        now_s = tick * 0.05
        if tick % 2 == 0:
            arrivals = arrived(arrivals, now_s)
        crowd = running(crowd, 5, now_s)
    assert expected_crowd(crowd, arrivals, 60.0, AHEAD_S) == pytest.approx(5.0, rel=0.05)
    for tick in range(200):
        arrivals = arrived(arrivals, 60.0 + tick * 0.025)
        crowd = running(crowd, 5 + tick // 50, 60.0 + tick * 0.025)
    assert expected_crowd(crowd, arrivals, 65.0, AHEAD_S) > 8.0


def test_nobody_is_taken_to_be_running_through_a_long_silence() -> None:
    crowd = running(running(Crowd(), 8, 0.0), 0, 500.0)
    assert crowd.mass_s < 1e-9


TIMES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30)


@settings(max_examples=100, deadline=None)
@given(TIMES, st.floats(-1e6, 1e6), st.floats(0.0, 10.0))
def test_whatever_the_clock_does_rates_stay_finite_and_positive(times: list[float], now_s: float, ahead: float) -> None:
    arrivals, crowd = Arrivals(), Crowd()
    for number, time_s in enumerate(times):
        arrivals, crowd = arrived(arrivals, time_s), running(crowd, number, time_s)
        assert 0.0 <= arrival_rate(arrivals, now_s) <= len(times)
        assert 0.0 <= expected_rate(arrivals, now_s, ahead) < 1e6
        assert 0.0 <= expected_crowd(crowd, arrivals, now_s, ahead) < 1e9


def test_after_a_clock_has_jumped_back_the_rate_fades_as_ever() -> None:
    arrivals = arrived(stream([3600.0 + i * 0.1 for i in range(100)]), 0.0)
    assert arrival_rate(arrivals, 0.0) > 5.0
    assert arrival_rate(arrivals, 60.0) < 0.1
