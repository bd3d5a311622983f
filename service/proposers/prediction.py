"""Predicted outputs: the text that the caller expects, followed and found again after every edit. No model.

Source: OpenAI's `prediction` field; copying from a reference text is arXiv 2304.04487.
"""

from dataclasses import dataclass

from ..alignment import Alignment
from ..messages import PREDICTION, Draft, DraftBatch, ProposeBatch, ProposeRow


@dataclass(slots=True)
class _Followed:
    """One request's prediction, where its output stands in it, and how much of the text is known."""

    output_start: int
    alignment: Alignment
    committed_len: int = 0


class PredictionProposer:
    """Drafts what the caller predicted. A request's prediction comes with the first row that is asked for it."""

    name = PREDICTION

    def __init__(self) -> None:
        self._held: dict[str, _Followed] = {}

    def propose(self, batch: ProposeBatch) -> DraftBatch:
        """Return what each prediction goes on with, empty where the output has left it; no draft without one."""
        for request_id in batch.closed:
            self._held.pop(request_id, None)
        drafts = []
        for row in batch.rows:
            followed = self._follow(row)
            if followed is not None:
                token_ids = followed.alignment.upcoming(row.gamma)
                drafts.append(Draft(row.request_id, row.committed_len, token_ids))
        return DraftBatch(batch.round, tuple(drafts), len(self._held))

    def _follow(self, row: ProposeRow) -> _Followed | None:
        """Return the row's prediction after its new tokens; None, and nothing kept, when some were missed."""
        followed = self._held.pop(row.request_id, None)
        if row.known_len == 0 and row.prediction is not None:
            followed = _Followed(row.prediction.output_start, Alignment(row.prediction.token_ids))
        known = None if followed is None else followed.committed_len
        if followed is None or known != row.known_len or known + len(row.new_token_ids) != row.committed_len:
            return None
        followed.alignment.extend(row.new_token_ids[max(followed.output_start - row.known_len, 0) :])
        followed.committed_len = row.committed_len
        self._held[row.request_id] = followed
        return followed
