"""Twenty prompts and the ways to speculate over them: whatever the way, the tokens must be plain decoding's."""

from dataclasses import dataclass
from typing import Any

from specserve.load.prompts import prompts
from specserve.service.requests import SpeculationMode

TWENTY = [one.text for workload in ("copy_heavy", "open_ended") for one in prompts(workload)[:10]]  # type: ignore[arg-type]
MAX_TOKENS = 32
TEMPERATURE = 0.8
SEED = 5


@dataclass(frozen=True)
class Way:
    """A wish for speculation; `gamma` None leaves the length to the adaptive policy."""

    mode: SpeculationMode
    gamma: int | None = None

    def __str__(self) -> str:
        return self.mode if self.gamma is None else f"fixed-{self.gamma}"

    def field(self, proposer: str) -> dict[str, Any]:
        """Return the request's `speculation` field."""
        if self.mode == "off":
            return {"mode": "off"}
        gamma = {} if self.gamma is None else {"max_draft_tokens": self.gamma}
        return {"mode": self.mode, "proposer": proposer, **gamma}


WAYS = [Way("on", 1), Way("on", 4), Way("on", 8), Way("auto")]
