"""Speculation on or off: turned by a clear gain, kept from turning to and fro, and probed for while off."""

import math
from dataclasses import dataclass

from .document import Limits

_CLEAR = 0.15
_NEAR = -0.01
_ENOUGH_DOUBT = 0.3
_DOUBT_AGAIN = 0.2
_FIRST_REST = 64
_LONGEST_REST = 2048
_MAX_PROBE_INTERVAL = 1024
_PROBE_LOSS = 0.005
_UNREST_S = 30.0
_CALM = math.exp(-1.0)
_UNREST_MARGIN = 0.04
_UNREST_PROBES = 8.0


@dataclass(slots=True)
class Switch:
    """Whether speculation is on, and the probes while it is not.

    `doubt` adds up what it is expected to lose, in plain rounds, less what it gains (a one-sided cumulative sum test).
    `rest` is how many rounds it stays off before it is tried again without a clear gain; it doubles each time.
    `hinted_probes` counts the probes before the gain became clear. `unrest` is how often it was lately turned on,
    faded over thirty seconds: each time asks for more gain the next, at more probes in a row, so that noise around a
    gain of nothing does not turn it to and fro. Off is never held up.
    """

    speculating: bool = True
    doubt: float = 0.0
    changed_round: int = 0
    rest: int = 0
    size: int = 0
    probing: bool = False
    probes: int = 0
    hinted_probes: int | None = None
    probe_interval: int = 0
    shortest_interval: int = 0
    next_probe_round: int = 0
    unrest: float = 0.0
    unrest_s: float = 0.0

    def turn(self, gain: float, size: int, round_number: int, limits: Limits, now_s: float) -> bool:
        """Return whether to speculate, given the logarithm of the gain expected at a batch of this size class."""
        age = round_number - self.changed_round
        self.unrest *= math.exp(-max(now_s - self.unrest_s, 0.0) / _UNREST_S)
        self.unrest_s = now_s
        if not self.speculating:
            rested = age >= limits.min_dwell_rounds or size != self.size
            clear = rested and self._confirmed(gain, round_number, limits)
            near = gain > _NEAR and self.hinted_probes is None
            again = near and age >= self.rest and self.unrest < _CALM and limits.probe_duty > 0.0
            if clear or again:
                self.speculating, self.doubt, self.changed_round = True, 0.0 if clear else _DOUBT_AGAIN, round_number
                self.unrest += 1.0
        else:
            self.doubt = max(self.doubt - gain, 0.0)
            if self.doubt > _ENOUGH_DOUBT:
                self.speculating, self.changed_round = False, round_number
                self.rest = _FIRST_REST if age > _LONGEST_REST else min(max(2 * self.rest, _FIRST_REST), _LONGEST_REST)
                self.probe_interval = first_interval(limits)
                self.next_probe_round = round_number + self.probe_interval
        self.size = size
        return self.speculating

    def _confirmed(self, gain: float, round_number: int, limits: Limits) -> bool:
        """Return whether the gain is beyond doubt, or clear and still there after one more probe."""
        margin = _UNREST_MARGIN * self.unrest
        if gain <= math.log1p(limits.min_gain) + margin:
            self.hinted_probes = None
            return False
        if gain > _CLEAR + 3.0 * margin or limits.probe_duty <= 0.0:
            return True
        if self.hinted_probes is None:
            self.hinted_probes = self.probes
            self.next_probe_round = min(self.next_probe_round, round_number + first_interval(limits))
        return self.probes - self.hinted_probes > _UNREST_PROBES * self.unrest

    def probe_due(self, round_number: int, limits: Limits) -> bool:
        """Return whether this round may draft although speculation is off."""
        return not self.speculating and limits.probe_duty > 0.0 and round_number >= self.next_probe_round

    def probed(self, round_number: int, loss_rounds: float, limits: Limits) -> None:
        """Note a probe that is expected to cost `loss_rounds` plain rounds: the next comes later."""
        self.probing = True
        self.probes += 1
        dearest = math.ceil(max(loss_rounds, 0.0) / _PROBE_LOSS)
        self.shortest_interval = min(max(dearest, first_interval(limits)), _MAX_PROBE_INTERVAL)
        self.probe_interval = min(max(2 * self.probe_interval, self.shortest_interval), _MAX_PROBE_INTERVAL)
        self.next_probe_round = round_number + self.probe_interval

    def heard(self, num_drafted: int, num_accepted: int, round_number: int) -> None:
        """Take in what a probe brought: a good one is repeated soon."""
        if self.probing and num_drafted and 2 * num_accepted >= num_drafted:
            self.probe_interval = self.shortest_interval
            self.next_probe_round = round_number + self.probe_interval
        self.probing = False


def first_interval(limits: Limits) -> int:
    """Return the fewest rounds between two probes."""
    return max(math.ceil(1.0 / limits.probe_duty), 1) if limits.probe_duty > 0.0 else 0
