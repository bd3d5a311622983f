"""Heads of every family beside a tiny target, and what a head gives without keeping anything."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from specserve.service.features import FeaturePages
from specserve.service.messages import AttachedName
from specserve.service.models import LoadedModel, head_of, load_model
from specserve.service.ports import Proposer
from specserve.service.proposers.attached import LOADERS, attach
from specserve.service.proposers.medusa import MedusaHeads

from .cells import save_tiny_llama
from .heads import deepseek_files, eagle3_files, eagle_files, medusa_files

LAYERS = 6
NAMES: tuple[AttachedName, ...] = ("eagle", "eagle3", "medusa", "mtp")
WITH_ROWS: tuple[AttachedName, ...] = ("eagle", "eagle3", "mtp")


class Headed(Protocol):
    """Who has a target and heads made for it."""

    model: LoadedModel
    folders: dict[AttachedName, Path]


class RandomHeads:
    """A target with one random head of every family."""

    def __init__(self, folder: Path) -> None:
        self.model = load_model(save_tiny_llama(folder / "target", 1, layers=LAYERS), torch.float64)
        self.folders: dict[AttachedName, Path] = {
            "eagle": eagle_files(folder / "eagle", self.model)[0],
            "eagle3": eagle3_files(folder / "eagle3", self.model, (2, 3, 3))[0],
            "medusa": medusa_files(folder / "medusa", self.model)[0],
            "mtp": deepseek_files(folder / "mtp", self.model, LAYERS)[0],
        }


def beside(
    headed: Headed, name: AttachedName, num_pages: int, page_tokens: int, trees: bool
) -> tuple[Proposer, FeaturePages]:
    """Return one head's proposer and the pages it reads; `trees` as in `attach`."""
    folders: Mapping[AttachedName, Path] = {name: headed.folders[name]}
    made, features = attach(folders, headed.model, head_of(headed.model), num_pages, page_tokens, trees)
    assert features is not None
    return made[name], features


def dense_head(
    name: AttachedName, folder: Path, model: LoadedModel, taps: Callable[[tuple[int, ...]], torch.Tensor],
    tokens: Sequence[int],
) -> Callable[[tuple[int, ...]], torch.Tensor]:  # fmt: skip
    """Return what gives the logits [vocab] after `tokens` and drafted ones, by one dense causal forward for each token
    drafted. `taps` reads the target's hidden states, of all tokens but the last."""
    head = LOADERS[name](folder, model, head_of(model))
    assert not isinstance(head, MedusaHeads)
    embed = model.trunk.get_input_embeddings()
    states: dict[tuple[int, ...], torch.Tensor] = {}

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        group = query.shape[1] // key.shape[1]
        scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(group, 1)) * query.shape[-1] ** -0.5
        scores = scores.masked_fill(~torch.ones(len(query), len(query), dtype=torch.bool).tril(), float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value.repeat_interleave(group, 1))

    @torch.inference_mode()
    def logits(drafted: tuple[int, ...]) -> torch.Tensor:
        if drafted and drafted[:-1] not in states:
            logits(drafted[:-1])
        hidden = states[drafted[:-1]] if drafted else head.fuse(taps(head.taps))
        residual, x = head.enter(hidden, embed(torch.tensor([*tokens, *drafted][1:])))
        some, out = head.leave(head.block(residual, x, torch.arange(len(hidden)), attend))
        states[drafted] = torch.cat([hidden, out[-1:]])
        if head.token_map is None:
            return some[-1]
        full = some.new_full((model.shape.vocab_size,), -torch.inf)
        full[head.token_map] = some[-1]
        return full

    return logits
