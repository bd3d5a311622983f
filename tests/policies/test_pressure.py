"""Pages are short at once and easy only after a while, so that nothing comes and goes with every request."""

from specserve.policies.pressure import Pressure


def test_a_preemption_or_an_empty_pool_is_short_until_pages_were_free_for_a_while() -> None:
    for free_share, num_preempted in ((0.5, 1), (0.04, 0)):
        pressure = Pressure()
        assert not pressure.note(0.5, 0, 0.0)
        assert pressure.note(free_share, num_preempted, 1.0)
        assert pressure.note(0.5, num_preempted, 2.0)
        assert pressure.note(0.5, num_preempted, 31.9)
        assert not pressure.note(0.5, num_preempted, 32.0)


def test_between_short_and_easy_it_is_as_it_was() -> None:
    pressure = Pressure()
    assert not any(pressure.note(0.1, 0, float(now_s)) for now_s in range(100))
    assert pressure.note(0.01, 0, 100.0)
    assert all(pressure.note(0.1, 0, float(now_s)) for now_s in range(101, 300))


def test_each_relapse_begins_the_wait_anew() -> None:
    pressure = Pressure()
    assert pressure.note(0.5, 1, 0.0)
    assert pressure.note(0.5, 1, 1.0)
    assert pressure.note(0.2, 1, 20.0)
    assert pressure.note(0.5, 1, 21.0)
    assert pressure.note(0.5, 2, 40.0)
    assert pressure.note(0.5, 2, 41.0)
    assert pressure.note(0.5, 2, 70.0)
    assert not pressure.note(0.5, 2, 71.0)
