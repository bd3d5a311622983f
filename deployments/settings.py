"""What an operator decides when a service starts: one frozen document, parsed once at the border."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specserve.policies.document import Policy, policy_from_dict, simple_policy
from specserve.service.errors import BadRequestError
from specserve.service.messages import ATTACHED, AttachedName
from specserve.service.models import DeviceName, DtypeName, embedded_dir
from specserve.service.skipping import Skip, layers_from, read_skip, whole_layers
from specserve.service.sources import ModelSource, parse_source, pinned

from .api.limits import RequestLimits

PluginPath = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
ProposerName = Literal[
    "prediction", "prompt_lookup", "suffix", "draft", "eagle", "eagle3", "medusa", "mtp", "layer_skip", "early_exit"
]
BESIDE_TARGET = (*ATTACHED, "layer_skip", "early_exit")
"""Proposers that live in the target's process, because they draft from what it computes."""
UNNAMED: tuple[str, ...] = ("prediction", "prompt_lookup", "draft", *BESIDE_TARGET)
"""What is offered, where it can be built, when nothing is named; the embedded heads then are not."""


class ServiceSettings(BaseModel):
    """Everything `specserve serve` and `LLM` need to know."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str | None = Field(
        None, description="A folder, a .gguf file, org/name[@revision] or a packaged model; None is the embedded one."
    )
    draft: str | None = Field(None, description="The draft model, named like `model`; None is the embedded one's.")
    draft_quantization: Literal["int8"] | None = Field(
        None, description="Keep the draft model's weights in int8; None keeps the dtype."
    )
    eagle: str | None = Field(None, description="The folder of an EAGLE-1 or EAGLE-2 head made for the target.")
    eagle3: str | None = Field(None, description="The folder of an EAGLE-3 head made for the target.")
    medusa: str | None = Field(None, description="The folder of Medusa heads made for the target.")
    mtp: str | None = Field(None, description="A folder with the target's MTP module; it may be the target's own.")
    head_drafts: Literal["tree", "chain"] = Field(
        "tree", description="What `eagle`, `eagle3`, `medusa` and `mtp` draft for greedy requests; others get chains."
    )
    layer_skip: tuple[int, ...] | str | None = Field(
        None, description="Layers that the target leaves out to draft for itself, or a file of `train layer_skip`."
    )
    early_exit: int | None = Field(None, ge=1, description="Layers after which the target drafts for itself.")
    suffix_drafts: Literal["tree", "chain"] = Field("tree", description="What suffix decoding drafts.")
    proposers: tuple[ProposerName | PluginPath, ...] | None = Field(
        None, description="What may draft; None is all that was given but suffix and the embedded target's own heads."
    )
    trusted_proposers: tuple[PluginPath, ...] = Field(
        (), description="Plug-ins whose draft probabilities are believed; a wrong one changes what is sampled."
    )
    dtype: DtypeName = "auto"
    placement: Literal["actors", "inline"] = "actors"
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    admin_port: int | None = Field(None, ge=0, le=65535, description="None is the one after `port`; 0 is any.")
    policy_store: str | None = Field(None, description="The SQLite file of policies; None is one for each admin port.")
    policy: str = Field("adaptive", description="off, fixed:N, adaptive, or a policy file.")
    max_model_len: int | None = Field(None, ge=16, description="Tokens; None is what the model was made for.")
    num_pages: int = Field(2048, ge=8)
    page_tokens: int = Field(16, ge=1)
    max_running: int = Field(32, ge=1, description="Requests that take part in a round.")
    max_cells: int = Field(1, ge=1, le=256, description="Engines, each with its target, that load may call for.")
    proposer_idle_s: float = Field(
        300.0, gt=0, description="Seconds after which a pooled proposer that nobody chose gives its memory back."
    )
    prefill_tokens: int = Field(512, ge=1, description="Prompt tokens that a round takes in when nobody decodes.")
    prefill_tokens_busy: int = Field(128, ge=1, description="Prompt tokens that a round takes in beside decoding ones.")
    prefix_caching: bool = Field(True, description="Keep the KV of whole prompt pages for those who repeat them.")
    keep_alive_s: float = Field(15.0, gt=0, description="Seconds after which a silent stream gets a comment line.")
    count_rejected_predictions: bool = Field(
        False, description="Count rejected prediction tokens in completion_tokens, as OpenAI bills them."
    )
    device: DeviceName = Field("auto", description="auto is the GPU where there is one.")
    num_threads: int = Field(2, ge=1, description="Threads of the target's forward.")
    api_keys: str | None = Field(None, description="A file of API keys' hashes; None lets everyone in.")
    admin_key_file: str | None = Field(None, description="A file that holds the admin key; it wins over the variable.")
    limits: RequestLimits = RequestLimits()

    @property
    def model_source(self) -> ModelSource:
        """Where the target's files come from."""
        return parse_source(self.model if self.model is not None else str(embedded_dir("target")))

    @property
    def draft_source(self) -> ModelSource | None:
        """Where the draft model's files come from; None when a foreign target was given without one."""
        if self.draft is not None:
            return parse_source(self.draft)
        return parse_source(str(embedded_dir("draft"))) if self.model is None else None

    @property
    def model_id(self) -> str:
        """The name clients use."""
        return "specserve-embedded" if self.model is None else self.model_source.name

    @property
    def attached_folders(self) -> dict[AttachedName, Path]:
        """Where the heads lie that draft beside the target, by proposer: those given and not left out."""
        given: dict[AttachedName, str | None] = {
            "eagle": self.eagle, "eagle3": self.eagle3, "medusa": self.medusa, "mtp": self.mtp
        }  # fmt: skip
        found = {name: Path(folder) for name, folder in given.items() if folder is not None}
        if self.proposers is None:
            return found
        if self.model is None:
            shipped = {name: embedded_dir(name) for name in ATTACHED if embedded_dir(name).exists()}
            found = shipped | found
        return {name: folder for name, folder in found.items() if name in self.proposers}

    def self_drafts(self, num_layers: int) -> dict[str, Skip]:
        """Return what each proposer that is the target itself leaves out of its `num_layers` layers.

        Raises: ModelUnsupportedError when it has no such layers.
        """
        found: dict[str, Skip] = {}
        if "layer_skip" in self.usable_proposers:
            named = self.layer_skip
            skip = read_skip(Path(named)) if isinstance(named, str) else whole_layers(named or ())
            found["layer_skip"] = skip.checked(num_layers)
        if "early_exit" in self.usable_proposers:
            found["early_exit"] = layers_from(self.early_exit or 0, num_layers)
        return found

    @property
    def plugins(self) -> tuple[str, ...]:
        """The import paths among the proposers."""
        return tuple(name for name in self.proposers or () if ":" in name)

    @property
    def usable_proposers(self) -> tuple[str, ...]:
        """The proposers that can be built: `draft` needs a draft model, heads their files, the others beside the target
        to be told their layers.

        Raises: BadRequestError for one that is named and cannot be.
        """
        lacking: dict[str, str] = {
            name: f"--{name} DIR with its files" for name in ATTACHED if name not in self.attached_folders
        }
        if self.draft_source is None:
            lacking["draft"] = "--draft MODEL"
        if self.layer_skip is None:
            lacking["layer_skip"] = "--layer-skip N,N or a file"
        if self.early_exit is None:
            lacking["early_exit"] = "--early-exit N"
        if self.proposers is None:
            return tuple(name for name in UNNAMED if name not in lacking)
        for name in self.proposers:
            if name in lacking:
                raise BadRequestError(f"the proposer {name} of {self.model_id} needs {lacking[name]}", "proposers")
        return self.proposers

    def pinned(self) -> Self:
        """Return settings that name the same files in every process of the service, whatever its folder."""
        named = {"model": self.model, "draft": self.draft}
        update = {field: str(pinned(parse_source(text))) for field, text in named.items() if text is not None}
        for field in ("api_keys", "admin_key_file", "layer_skip", *ATTACHED):
            file = getattr(self, field)
            if isinstance(file, str):
                update[field] = str(Path(file).absolute())
        return self.model_copy(update=update)


def load_settings(file: str | None, given: dict[str, Any]) -> ServiceSettings:
    """Return the settings in a YAML `file`, if one is named, with those of the command line, `given`, over them.

    Raises: BadRequestError naming the file or the field.
    """
    stated = {} if file is None else _read_settings(file)
    try:
        return ServiceSettings.model_validate({**stated, **given})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        place = where if where.partition(".")[0] in given else f"{file}: {where}"
        if first["type"] == "extra_forbidden":
            known = ", ".join((RequestLimits if len(first["loc"]) > 1 else ServiceSettings).model_fields)
            raise BadRequestError(f"{place} is no setting; there are: {known}", where) from error
        raise BadRequestError(f"{place}: {first['msg']} (got {first['input']!r})", where) from error


def _read_settings(file: str) -> dict[str, Any]:
    try:
        stated = yaml.safe_load(Path(file).read_text())
    except OSError as error:
        raise BadRequestError(f"cannot read {file}: {error.strerror}", "config") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadRequestError(f"{file} is no YAML: {' '.join(str(error).split())}", "config") from error
    if stated is None:
        return {}
    if not isinstance(stated, dict) or not all(isinstance(name, str) for name in stated):
        raise BadRequestError(f"{file} holds no settings; a line is `name: value`", "config")
    return stated


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
