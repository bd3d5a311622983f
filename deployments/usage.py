"""What a service's cells use of each key's limits: each tells the controller, and hears what the others use."""

from collections.abc import Mapping
from dataclasses import dataclass

LIVE_S = 5.0
REMEMBERED_S = 61.0


@dataclass(frozen=True, slots=True)
class Used:
    """Requests and tokens of the last minute, and choices being generated now."""

    requests: int = 0
    tokens: int = 0
    running: int = 0

    def plus(self, other: "Used") -> "Used":
        """Return the sum of both."""
        return Used(self.requests + other.requests, self.tokens + other.tokens, self.running + other.running)


NOTHING = Used()


@dataclass(frozen=True, slots=True)
class KeyUse:
    """What one key uses, and what of it is priority. In messages: about 60 bytes and the key's id."""

    everything: Used = NOTHING
    priority: Used = NOTHING

    def plus(self, other: "KeyUse") -> "KeyUse":
        """Return the sum of both."""
        return KeyUse(self.everything.plus(other.everything), self.priority.plus(other.priority))

    def ended(self) -> "KeyUse":
        """Return what is left of a cell's use once the cell is gone."""
        return KeyUse(
            Used(self.everything.requests, self.everything.tokens), Used(self.priority.requests, self.priority.tokens)
        )


class SharedUsage:
    """The last word of every cell. A silent one's choices count for 5 s, what it used for a minute."""

    def __init__(self) -> None:
        self._cells: dict[str, tuple[float, Mapping[str, KeyUse]]] = {}

    def exchange(self, cell_id: str, used: Mapping[str, KeyUse], now_s: float) -> dict[str, KeyUse]:
        """Take in what a cell uses and return what the others use, key by key."""
        self._cells[cell_id] = (now_s, used)
        total: dict[str, KeyUse] = {}
        for other, (heard_s, theirs) in list(self._cells.items()):
            age_s = now_s - heard_s
            if age_s > REMEMBERED_S:
                del self._cells[other]
            elif other != cell_id:
                for key_id, use in theirs.items():
                    counted = use if age_s <= LIVE_S else use.ended()
                    total[key_id] = total.get(key_id, KeyUse()).plus(counted)
        return total
