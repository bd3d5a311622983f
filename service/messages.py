"""What travels between engine, target, verifier and proposers in a round: frozen, plain, and small.

Every message carries what identifies its round; an answer that does not match is dropped. Sizes are stated for the
body alone, in bytes; r is the number of rows.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from .trees import depths, followed, paths

Acceptance = Literal["coupled", "rejection", "block"]
AttachedName = Literal["eagle", "eagle3", "medusa", "mtp"]
FinishReason = Literal["stop", "length"]

PREDICTION = "prediction"
"""The name of the proposer that only requests with a prediction may use."""

ATTACHED: tuple[AttachedName, ...] = get_args(AttachedName)
"""The proposers that live beside the target, because they draft from its hidden states."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request turns logits into a token. `greedy` is a mode of its own; temperature is then unused.

    `repetition_penalty` looks at prompt and output (transformers' meaning), `presence_penalty` and `frequency_penalty`
    at the output alone (OpenAI's); `logit_bias` holds distinct token ids. These hold for greedy requests, too.
    """

    greedy: bool = True
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    acceptance: Acceptance = "coupled"
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def penalised(self) -> bool:
        """True when the distribution depends on which tokens came before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """One request's part of a forward: feed `token_ids` at positions `start_position`, ... .

    The last `num_sampled` positions (0 for a prefill chunk that is not the last) go on to the verifier.
    With `parents` the tokens are a draft tree (`trees.py`; the first is node 0): their KV rows go to consecutive slots
    all the same, but a token's position is `start_position` plus its depth, and it sees only the nodes on its way.
    `moved_from`: the KV rows of the last positions before `start_position` are still in the slots of these, where an
    earlier tree put them; they are moved before anything is computed.
    Size: 4 * (tokens + parents + moved + pages) + id.
    """

    request_id: str
    start_position: int
    token_ids: tuple[int, ...]
    num_sampled: int
    block_table: tuple[int, ...]
    parents: tuple[int, ...] | None = None
    moved_from: tuple[int, ...] = ()

    @property
    def ways(self) -> tuple[tuple[int, ...], ...] | None:
        """The places that each token of a tree sees beyond the context: the way to it, its own last. None: a chain."""
        if self.parents is None:
            return None
        return tuple(tuple(self.start_position + node for node in path) for path in paths(self.parents))


@dataclass(frozen=True, slots=True)
class ScoreBatch:
    """One packed target forward. Scoring the same batch again writes the same KV rows, so a round can be replayed."""

    round: int
    rows: tuple[ScoreRow, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """Hidden states after the final norm of every sampled position, packed in row order.

    Shapes: `hidden` [sum(num_sampled), hidden] float32 or uint16 (bf16 bits, when `bfloat16`). Size: hidden * 2 or 4.
    """

    round: int
    bfloat16: bool
    hidden: npt.NDArray[np.float32] | npt.NDArray[np.uint16] | npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Guessed tokens after `committed_len` tokens of a request: a chain, or the tree with these `parents` (`trees.py`).

    `support_ids`/`support_probs` [gamma, support] are the truncated distributions the tokens were *sampled* from (for
    siblings the one they were drawn from without replacement, in their order); None when the draft is deterministic or
    coupled. Size: 4 * gamma * (1 + 2 * support), and 4 * gamma for a tree.
    """

    request_id: str
    committed_len: int
    token_ids: tuple[int, ...]
    support_ids: npt.NDArray[np.int32] | None = None
    support_probs: npt.NDArray[np.float32] | None = None
    parents: tuple[int, ...] | None = None

    @property
    def depth(self) -> int:
        """The most tokens that can be accepted."""
        return len(self.token_ids) if self.parents is None else max(depths(self.parents))

    def left_at(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return where scoring the draft left the KV rows of the `token_ids` committed, but for those in place.

        The row of the last token is to come, whether it was drafted or not.
        """
        if self.parents is None:
            return ()
        path = followed(self.parents, self.token_ids, token_ids[:-1])
        return tuple(self.committed_len - 1 + node for depth, node in enumerate(path, start=1) if node != depth)


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """The distinct tokens that a request's penalties look at, and how often each stands in its committed output.

    Shapes: both [tokens]; a count of 0 is a token of the prompt alone. Size: 8 * tokens.
    """

    token_ids: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar's text and the committed output that must follow it: all that a verifier needs after a restart.

    Size: the text + 4 * output tokens.
    """

    grammar: str
    output_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class VerifyRow:
    """One request's sampled positions: `len(draft.token_ids) + 1` of them when there is a draft, else one.

    The token after all `committed_len` committed ones is the first to be decided; its position is `committed_len`. With
    `parents` the draft is a tree, and each node's position and prefix are those of the way to it.
    `history` comes with penalties alone. At the first `num_barred` positions no token of `barred_token_ids` may appear.
    """

    request_id: str
    committed_len: int
    sampling: Sampling
    draft_token_ids: tuple[int, ...]
    support_ids: npt.NDArray[np.int32] | None
    support_probs: npt.NDArray[np.float32] | None
    num_logprobs: int | None
    history: History | None = None
    barred_token_ids: tuple[int, ...] = ()
    num_barred: int = 0
    parents: tuple[int, ...] | None = None
    constraint: Constraint | None = None

    @property
    def positions(self) -> list[int]:
        """The position of the token decided at each node."""
        offsets = range(len(self.draft_token_ids) + 1) if self.parents is None else depths(self.parents)
        return [self.committed_len + offset for offset in offsets]

    @property
    def adjusted(self) -> bool:
        """True when the raw logits change before they become a distribution."""
        return bool(self.sampling.logit_bias) or self.history is not None or self.num_barred > 0


@dataclass(frozen=True, slots=True)
class VerifyBatch:
    """The rows of a round whose tokens are decided now, in the order of their features."""

    round: int
    rows: tuple[VerifyRow, ...]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The target's log-probability of one emitted token (before temperature and truncation) and its best others."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a request gets from a round: `num_accepted` draft tokens and one more, the correction or bonus token."""

    request_id: str
    committed_len: int
    num_accepted: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class VerdictBatch:
    """The verdicts of one round; `head_ms` is the time spent in head, processors and acceptance."""

    round: int
    verdicts: tuple[Verdict, ...]
    head_ms: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the caller expects its output to be; the output begins after `output_start` tokens. Size: 4 * tokens."""

    output_start: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ProposeRow:
    """Asks for `gamma` tokens after `committed_len`; brings the committed tokens from `known_len` on.

    A proposer that holds fewer than `known_len` tokens of the request answers with an empty draft and forgets it.
    `prediction` comes only to the proposer of that name, and only with `known_len` 0: it keeps it, or has it again.
    `block_table` are the target's pages of the request, for proposers that live beside it (`ProposerPort.needs_pages`),
    and the rows of the last committed tokens but one are at the positions `moved_from` there (`ScoreRow`).
    What is learned from one request may show in the drafts of others of the same `scope` alone.
    """

    request_id: str
    committed_len: int
    known_len: int
    new_token_ids: tuple[int, ...]
    gamma: int
    sampling: Sampling
    prediction: Prediction | None = None
    block_table: tuple[int, ...] = ()
    moved_from: tuple[int, ...] = ()
    scope: str = ""


@dataclass(frozen=True, slots=True)
class ProposeBatch:
    """One message per proposer and round; `closed` are requests whose draft state may be freed."""

    round: int
    proposer: str
    rows: tuple[ProposeRow, ...]
    closed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """Drafts for some or all rows of a `ProposeBatch`, and which requests the proposer still holds."""

    round: int
    drafts: tuple[Draft, ...]
    num_held_requests: int
