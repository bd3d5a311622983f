"""Where a text stands in the prediction its caller sent: followed token by token, found again after a divergence."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable

_LONGEST_ENDING = 8
_SURE = 2
_CLEAR = 4
_NEAR = 32
_TRIED = 16


class Alignment:
    """The place of one growing text in its prediction, a function of the two alone.

    The text is expected to begin with the prediction. A token that is not the next expected one loses the place, which
    is found again where the longest ending of the text, up to 8 tokens, stands in the prediction: at the nearest such
    place ahead of the last sure one, else behind it. One token alone is an ending only within 32 tokens ahead, gives
    way to four that stand behind, and becomes a sure place when the token after it fits too.
    Cost: O(1) per token, since only the 16 nearest places on either side are compared; O(prediction) to begin.
    """

    def __init__(self, token_ids: tuple[int, ...]) -> None:
        self._token_ids = token_ids
        self._places: dict[int, list[int]] = {}
        for place, token_id in enumerate(token_ids):
            self._places.setdefault(token_id, []).append(place)
        self._ending: deque[int] = deque(maxlen=_LONGEST_ENDING)
        self._next: int | None = 0
        self._num_fitting = _SURE
        self._last_sure = 0
        self._num_unclaimed = 0
        self._appeared: set[int] = set()

    @property
    def num_appeared(self) -> int:
        """Tokens of the prediction that appeared in the text at a sure place.

        A token of the text stands for one of the prediction at most, so this exceeds neither's length; it does not
        depend on how the text was cut into rounds.
        """
        return len(self._appeared)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append `token_ids` to the text."""
        for token_id in token_ids:
            self._append(token_id)

    def upcoming(self, num_tokens: int) -> tuple[int, ...]:
        """Return up to `num_tokens` tokens expected now; none while the place is lost."""
        return () if self._next is None else self._token_ids[self._next : self._next + num_tokens]

    def _append(self, token_id: int) -> None:
        self._ending.append(token_id)
        self._num_unclaimed += 1
        if self._next is not None and self._token_ids[self._next : self._next + 1] == (token_id,):
            self._next += 1
            self._num_fitting += 1
        else:
            self._find(token_id)
        if self._next is not None and self._num_fitting >= _SURE:
            new = min(self._num_fitting, self._num_unclaimed)
            self._appeared.update(range(self._next - new, self._next))
            self._num_unclaimed = 0
            self._last_sure = self._next

    def _find(self, token_id: int) -> None:
        """Set the place by the text's ending, or lose it."""
        places = self._places.get(token_id, [])
        middle = bisect_left(places, self._last_sure)
        fitting, place = self._longest(places[middle : middle + _TRIED])
        if fitting < _SURE:
            near = fitting > 0 and place - self._last_sure < _NEAR
            behind = self._longest(places[max(middle - _TRIED, 0) : middle][::-1])
            if behind[0] >= (_CLEAR if near else _SURE):
                fitting, place = behind
            elif not near:
                fitting = 0
        self._num_fitting = fitting
        self._next = place + 1 if fitting else None

    def _longest(self, places: list[int]) -> tuple[int, int]:
        """Return how long the longest ending is that stands at one of `places`, and the first such place."""
        best, found = 0, 0
        for place in places:
            fitting = 0
            for token_id in reversed(self._ending):
                if fitting > place or self._token_ids[place - fitting] != token_id:
                    break
                fitting += 1
            if fitting > best:
                best, found = fitting, place
        return best, found
