"""What an operator decides when a service starts: one frozen document, parsed once at the border."""

from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from specserve.policies.document import Policy, policy_from_dict, simple_policy
from specserve.service.errors import BadRequestError
from specserve.service.models import DtypeName, embedded_dir

ProposerName = Literal["draft", "prompt_lookup"]


class ServiceSettings(BaseModel):
    """Everything `specserve serve` and `LLM` need to know."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str | None = Field(None, description="Folder of the target model; None is the embedded one.")
    draft: str | None = Field(None, description="Folder of the draft model; None is the embedded one's.")
    proposers: tuple[ProposerName, ...] = ("prompt_lookup", "draft")
    dtype: DtypeName = "auto"
    placement: Literal["actors", "inline"] = "actors"
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    policy: str = Field("adaptive", description="off, fixed:N, adaptive, or a policy file.")
    max_model_len: int | None = Field(None, ge=16, description="Tokens; None is what the model was made for.")
    num_pages: int = Field(2048, ge=8)
    page_tokens: int = Field(16, ge=1)
    max_running: int = Field(32, ge=1)
    num_threads: int = Field(2, ge=1, description="Threads of the target's forward.")

    @property
    def model_dir(self) -> Path:
        """The target's folder."""
        return Path(self.model) if self.model is not None else embedded_dir("target")

    @property
    def draft_dir(self) -> Path | None:
        """The draft model's folder; None when a foreign target was given without one."""
        if self.draft is not None:
            return Path(self.draft)
        return embedded_dir("draft") if self.model is None else None

    @property
    def model_id(self) -> str:
        """The name clients use."""
        return "specserve-embedded" if self.model is None else Path(self.model).name

    @property
    def usable_proposers(self) -> tuple[ProposerName, ...]:
        """The proposers that can be built: `draft` needs a draft model."""
        return tuple(name for name in self.proposers if name != "draft" or self.draft_dir is not None)


def load_policy(text: str) -> Policy:
    """Return the policy named by `off`, `fixed:N`, `adaptive` or read from a YAML or JSON file."""
    if text in ("off", "adaptive") or text.startswith("fixed:"):
        try:
            return simple_policy(text)
        except ValueError as error:
            raise BadRequestError(f"--policy {text}: {error}", "policy") from error
    path = Path(text)
    if not path.exists():
        raise BadRequestError(f"--policy is off, fixed:N, adaptive or a file; there is no file {text!r}", "policy")
    try:
        return policy_from_dict(yaml.safe_load(path.read_text()))
    except (ValueError, yaml.YAMLError) as error:
        raise BadRequestError(f"{text}: {error}", "policy") from error
