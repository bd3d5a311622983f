"""`usage` and `metrics` of a response, derived from the counters of finished requests.

`metrics` has vLLM's shape: `mean_acceptance_length` is 1 + accepted / rounds (bonus token included),
`draft_acceptance_rate` is accepted / drafted; only rounds that drafted count. The histogram has
`num_spec_tokens` + 1 places, sums to `num_spec_steps`, and weighted by its index to `num_accepted_draft_tokens`.
"""

from dataclasses import dataclass
from typing import Any

from specserve.service.requests import RequestSummary


@dataclass(frozen=True, slots=True)
class PredictionUse:
    """What became of the predictions' tokens: `accepted` appeared in the output, `rejected` did not.

    Both are about the caller's text, not about drafts: `service.alignment` says what appears, whether a proposer
    drafted it or not, and so neither depends on speculation. Together they are all tokens of the prediction, once for
    each choice.
    """

    accepted: int
    rejected: int


def usage(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int, prediction: PredictionUse | None = None
) -> dict[str, Any]:
    """Return OpenAI's usage object; it tells of predictions only where there was one."""
    found: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    if prediction is not None:
        found["completion_tokens_details"] = {
            "accepted_prediction_tokens": prediction.accepted,
            "rejected_prediction_tokens": prediction.rejected,
        }
    return found


def metrics(summary: RequestSummary, num_choices: int) -> dict[str, Any]:
    """Return the metrics of a response's first choice; speculation counters only when it is the only one."""
    after_first = summary.completion_tokens - 1
    served_ms = summary.time_to_first_token_ms - summary.queue_ms + summary.generation_ms
    return {
        "time_to_first_token_ms": summary.time_to_first_token_ms,
        "generation_time_ms": summary.generation_ms,
        "queue_time_ms": summary.queue_ms,
        "mean_itl_ms": summary.generation_ms / after_first if after_first > 0 else None,
        "tokens_per_second": summary.completion_tokens * 1e3 / served_ms if served_ms > 0 else None,
        "speculative_decoding": speculative_decoding(summary) if num_choices == 1 else None,
        "speculation": {
            "mode": summary.mode,
            "reason": summary.reason,
            "proposer": summary.proposer,
            "tier": summary.tier,
            "policy_version": summary.policy_version,
        },
    }


def speculative_decoding(summary: RequestSummary) -> dict[str, Any]:
    """Return the speculation counters of one request; the ratios are None when nothing was drafted."""
    rounds, drafted, accepted = summary.num_spec_rounds, summary.num_draft_tokens, summary.num_accepted_tokens
    histogram = list(summary.acceptance_histogram) or [0]
    return {
        "mean_acceptance_length": 1 + accepted / rounds if rounds else None,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "acceptance_histogram": histogram,
        "num_spec_steps": rounds,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": len(histogram) - 1,
    }
