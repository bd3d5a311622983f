"""What a caller asks of the engine, and what comes back each round."""

from dataclasses import dataclass
from typing import Literal

from .messages import FinishReason, Sampling, TokenLogprob

SpeculationMode = Literal["auto", "on", "off"]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One completion to generate. `mode`, `max_draft_tokens` and `proposer` are the caller's wishes for speculation."""

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


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """Counters of a finished request; ratios are derived by whoever reads them.

    `acceptance_histogram[k]` counts speculating rounds that accepted exactly k draft tokens;
    its length is the largest gamma used plus one.
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


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one round added to one request: new text (maybe empty), its tokens, and at the end the summary."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None = None
    summary: RequestSummary | None = None
