"""What a caller asks of the engine, and what comes back each round."""

from dataclasses import dataclass
from typing import Literal

from .errors import BadRequestError, PromptTooLongError
from .messages import PREDICTION, FinishReason, Prediction, Sampling, TokenLogprob

SpeculationMode = Literal["auto", "on", "off"]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One completion to generate. `mode`, `max_draft_tokens` and `proposer` are the caller's wishes for speculation.

    `priority` orders the requests of a tier, lower first (vLLM's meaning). Only requests with the same `cache_salt`
    share cached prefixes, so that no tenant can guess another's prompts from the time they take.
    `prediction_token_ids` is the output the caller expects; it changes the speed and nothing else.
    `grammar` is the text of the grammar that the output must follow (`json_schema.py` writes such).
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    tier: str = "default"
    mode: SpeculationMode = "auto"
    max_draft_tokens: int | None = None
    proposer: str | None = None
    priority: int = 0
    cache_salt: str = ""
    prediction_token_ids: tuple[int, ...] | None = None
    grammar: str | None = None

    @property
    def prediction(self) -> Prediction | None:
        """The prediction as messages carry it; None when there is none, or nothing in it."""
        if not self.prediction_token_ids:
            return None
        return Prediction(len(self.prompt_token_ids), self.prediction_token_ids)


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """Counters of a finished request; ratios are derived by whoever reads them.

    `cached_tokens` are prompt tokens whose KV was found, not computed; what a preempted request finds again of its own
    is not counted. `acceptance_histogram[k]` counts speculating rounds that accepted exactly k draft tokens; its length
    is the largest gamma used plus one. `accepted_prediction_tokens` are the tokens of the caller's prediction that
    appeared in the output, whoever drafted them or nobody (`Alignment.num_appeared`); None when it sent none.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    num_rounds: int
    num_spec_rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_histogram: tuple[int, ...]
    mode: SpeculationMode
    reason: str
    proposer: str | None
    tier: str
    policy_version: int
    queue_ms: float
    time_to_first_token_ms: float
    generation_ms: float
    accepted_prediction_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one round added to one request: new text (maybe empty), its tokens, and at the end the summary.

    Of its tokens, `num_accepted` were among the `num_drafted` that were drafted for it.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None = None
    summary: RequestSummary | None = None
    num_drafted: int = 0
    num_accepted: int = 0


def check_request(request: GenerationRequest, vocab_size: int, max_tokens: int, proposers: frozenset[str]) -> None:
    """Raise BadRequestError, naming the field, when `request` can never succeed.

    `max_tokens` are the prompt and output tokens that can ever fit.
    """
    length = len(request.prompt_token_ids)
    if length == 0:
        raise BadRequestError("the prompt is empty", "prompt")
    if not all(0 <= token_id < vocab_size for token_id in request.prompt_token_ids):
        raise BadRequestError(f"a token id is outside 0..{vocab_size - 1}", "prompt")
    for field, token_ids in (
        ("stop_token_ids", request.stop_token_ids),
        ("logit_bias", [token_id for token_id, _ in request.sampling.logit_bias]),
    ):
        if not all(0 <= token_id < vocab_size for token_id in token_ids):
            raise BadRequestError(f"a token id is outside 0..{vocab_size - 1}", field)
    if request.max_tokens < 1:
        raise BadRequestError("max_tokens must be at least 1", "max_tokens")
    if length + request.max_tokens > max_tokens:
        raise PromptTooLongError(
            f"this model's context is {max_tokens} tokens; the prompt has {length} and max_tokens asks for "
            f"{request.max_tokens}",
            "prompt",
            "context_length_exceeded",
        )
    predicted = request.prediction_token_ids or ()
    if len(predicted) > max_tokens:
        raise BadRequestError(
            f"this model's context is {max_tokens} tokens; the prediction has {len(predicted)}", "prediction"
        )
    if not all(0 <= token_id < vocab_size for token_id in predicted):
        raise BadRequestError(f"a token id of the prediction is outside 0..{vocab_size - 1}", "prediction")
    if request.proposer == PREDICTION and not predicted:
        raise BadRequestError("the proposer 'prediction' needs a prediction", "speculation.proposer")
    if request.proposer is not None and request.proposer not in proposers:
        known = ", ".join(sorted(proposers)) or "none"
        raise BadRequestError(f"no proposer {request.proposer!r} here; there is: {known}", "speculation.proposer")
