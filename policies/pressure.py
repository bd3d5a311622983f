"""Whether a cell's KV pages are short, so that memory nobody drafts with is better given back."""

from dataclasses import dataclass

_SHORT_SHARE, _EASY_SHARE = 0.05, 0.25
_EASY_S = 30.0


@dataclass(slots=True)
class Pressure:
    """Pages are short from the moment a request lost its own or hardly any is free, until a good part of them was free
    for a while and nobody lost any: in between it is as it was."""

    short: bool = False
    num_preempted: int = 0
    easy_s: float | None = None

    def note(self, free_share: float, num_preempted: int, now_s: float) -> bool:
        """Return whether pages are short, given the share that is free and how often a request lost its own so far."""
        preempted, self.num_preempted = num_preempted > self.num_preempted, num_preempted
        if preempted or free_share < _EASY_SHARE:
            self.easy_s = None
        elif self.easy_s is None:
            self.easy_s = now_s
        if preempted or free_share < _SHORT_SHARE:
            self.short = True
        elif self.easy_s is not None and now_s - self.easy_s >= _EASY_S:
            self.short = False
        return self.short
