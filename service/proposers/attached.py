"""Proposers that live beside the target, because they draft from its hidden states: how each is loaded and made."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import torch
from torch import nn

from ..features import FeaturePages
from ..messages import AttachedName
from ..models import LoadedModel
from ..packed_linear import Head
from ..ports import Proposer
from .confidence_tree import TreeLimits
from .eagle import load_eagle
from .eagle3 import load_eagle3
from .feature_rows import RowHead, RowProposer
from .medusa import MedusaHeads, MedusaProposer, load_medusa
from .mtp import load_mtp

LOADERS: Mapping[AttachedName, Callable[[Path, LoadedModel, Head], RowHead | MedusaHeads]] = {
    "eagle": load_eagle,
    "eagle3": lambda folder, model, readout: load_eagle3(folder, model),
    "medusa": load_medusa,
    "mtp": load_mtp,
}


def attach(
    folders: Mapping[AttachedName, Path],
    model: LoadedModel,
    readout: Head,
    num_pages: int,
    page_tokens: int,
    trees: bool = True,
) -> tuple[dict[str, Proposer], FeaturePages | None]:
    """Return the proposers of the heads in `folders`, and the pages that `model`'s target is to fill for them all.

    `readout` is the model's own head, for those that have none. With `trees` greedy requests get trees, else chains.

    Raises: ModelUnsupportedError when a head was made for another target.
    """
    if not folders:
        return {}, None
    weight = model.head.weight
    assert isinstance(weight, torch.Tensor)
    heads = {name: LOADERS[name](folder, model, readout) for name, folder in folders.items()}
    layers = [tap for head in heads.values() for tap in head.taps]
    features = FeaturePages(layers, model.config.hidden_size, num_pages, page_tokens, weight)
    embed: nn.Module = model.trunk.get_input_embeddings()  # type: ignore[operator]  # a transformers model
    made: dict[str, Proposer] = {}
    for name, head in heads.items():
        cast(nn.Module, head).to(weight.device)
        if isinstance(head, MedusaHeads):
            made[name] = MedusaProposer(head, features, trees)
        else:
            made[name] = RowProposer(
                name, head, embed, features, num_pages, page_tokens, model.shape.max_positions, model.shape.vocab_size,
                TreeLimits() if trees else None,
            )  # fmt: skip
    return made, features
