"""With every part behind a socket no proposer changes a token either."""

from collections.abc import Callable

import pytest
from support.channelled import channelled
from support.everybody import (
    MIXTURES,
    NUM_REQUESTS,
    PROPOSERS,
    SAMPLINGS,
    SITUATIONS,
    SUFFIXES,
    Everybody,
    Rotating,
    check,
)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", PROPOSERS)
def test_no_proposer_changes_a_token(everybody: Everybody, name: str, sampling: str) -> None:
    planner = Rotating([name])
    check(everybody, planner, [name], sampling, NUM_REQUESTS, "cached prefixes", channelled)
    num_drafted, num_accepted = planner.counts(name)
    assert 0 < num_accepted < num_drafted


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("planner", MIXTURES.values(), ids=MIXTURES)
def test_no_mixture_of_proposers_changes_a_token(
    everybody: Everybody, planner: Callable[[], Rotating], situation: str
) -> None:
    mixed = planner()
    check(everybody, mixed, mixed.names, "both", NUM_REQUESTS, situation, channelled)
    assert all(mixed.counts(name)[0] for name in set(mixed.names) - set(SUFFIXES))
