"""What penalties must know of a request's past, kept up to date as tokens are committed."""

from collections.abc import Sequence

import numpy as np

from .messages import History, Sampling


class TokenCounts:
    """How often each token stands in one request's output; the prompt's are listed when repetition is penalised."""

    def __init__(self, prompt_token_ids: Sequence[int], sampling: Sampling) -> None:
        self._counts = dict.fromkeys(prompt_token_ids if sampling.repetition_penalty != 1.0 else (), 0)
        self._num_counted = 0

    def history(self, output_token_ids: Sequence[int]) -> History:
        """Return the history after `output_token_ids`, which go on where those of the last call ended.

        Cost: the tokens that are new, and a copy of the distinct ones.
        """
        for token_id in output_token_ids[self._num_counted :]:
            self._counts[token_id] = self._counts.get(token_id, 0) + 1
        self._num_counted = len(output_token_ids)
        return History(
            np.fromiter(self._counts.keys(), np.int32, len(self._counts)),
            np.fromiter(self._counts.values(), np.int32, len(self._counts)),
        )
