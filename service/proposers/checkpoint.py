"""Files of heads, read strictly: what is missing, unexpected or of another shape is an error that names it."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from ..errors import ModelUnsupportedError
from ..models import LoadedModel

LOG = logging.getLogger(__name__)
WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def read_config(folder: Path) -> dict[str, Any]:
    """Return `config.json`. Raises: ModelUnsupportedError when it cannot be read."""
    try:
        stated: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelUnsupportedError(f"cannot read {folder}/config.json: {error}") from error
    return stated


def read_tensors(
    folder: Path, wanted: Callable[[str], bool] = lambda name: True, files: Sequence[str] = WEIGHTS
) -> dict[str, torch.Tensor]:
    """Return the `wanted` tensors of the first of `files` that is there, or of the shards of an index.

    Pickled files are read as tensors alone (`weights_only`), so that none can run code.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = json.loads(index.read_text())["weight_map"]
        found = [folder / name for name in sorted({file for tensor, file in shards.items() if wanted(tensor)})]
    else:
        found = [folder / name for name in files if (folder / name).exists()][:1]
    if not found:
        raise ModelUnsupportedError(f"{folder} has none of the files {', '.join(files)} with weights of a head")
    tensors: dict[str, torch.Tensor] = {}
    for path in found:
        try:
            tensors |= _read(path, wanted)
        except Exception as error:  # torch and safetensors raise what they like for files they do not know
            raise ModelUnsupportedError(f"cannot read {path}: {str(error).partition(chr(10))[0]}") from error
    return tensors


def _read(path: Path, wanted: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys() if wanted(name)}  # noqa: SIM118  # no mapping
    state = torch.load(path, map_location="cpu", weights_only=True)
    return {name: tensor for name, tensor in state.items() if wanted(name)}


def fill(module: nn.Module, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Load `tensors` into `module`. Raises: ModelUnsupportedError unless they are exactly its own."""
    state = module.state_dict()
    missing, unexpected = sorted(set(state) - set(tensors)), sorted(set(tensors) - set(state))
    if missing or unexpected:
        raise ModelUnsupportedError(f"{folder}: tensors missing: {_some(missing)}; unexpected: {_some(unexpected)}")
    for name, tensor in state.items():
        if tensors[name].shape != tensor.shape:
            found, wanted = tuple(tensors[name].shape), tuple(tensor.shape)
            raise ModelUnsupportedError(f"{folder}: {name} is {found}; this target needs {wanted}")
    module.load_state_dict(tensors)


def check_target(stated: Mapping[str, Any], model: LoadedModel, folder: Path) -> None:
    """Return when nothing that the head's configuration declares speaks against `model` as its target.

    Names decide nothing, since a folder may be called anything; kinds and sizes do. Raises: ModelUnsupportedError.
    """
    layer = stated.get("transformer_layer_config", stated)
    declared, vocab = layer.get("vocab_size"), model.shape.vocab_size
    if declared is not None and declared != vocab:
        raise ModelUnsupportedError(f"{folder} was made for {declared} tokens; this target has {vocab}")
    verifier = (stated.get("speculators_config") or {}).get("verifier") or {}
    kinds, own = verifier.get("architectures") or [], getattr(model.config, "architectures", None) or []
    if kinds and own and not set(kinds) & set(own):
        raise ModelUnsupportedError(f"{folder} was made for a {kinds[0]}; this target is a {own[0]}")
    name = verifier.get("name_or_path") or stated.get("base_model_name_or_path")
    if name:
        LOG.info("head %s says that it was made for %s", folder, name)


def without_copies(tensors: Mapping[str, torch.Tensor], copies: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return `tensors` without those of `copies` that say the same as the target's own."""
    same = {
        name
        for name, own in copies.items()
        if name in tensors and tensors[name].shape == own.shape and torch.equal(tensors[name].to(own), own)
    }
    return {name: tensor for name, tensor in tensors.items() if name not in same}


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "none"
