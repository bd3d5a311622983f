"""Heads beside a tiny target: a cell that has one of every family, and what a head gives without keeping anything."""

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from specserve.service.features import FeaturePages
from specserve.service.inline import InlineProposerPort
from specserve.service.messages import AttachedName, Sampling
from specserve.service.models import LoadedModel, head_of, load_model
from specserve.service.ports import Proposer, ProposerPort
from specserve.service.proposers.attached import LOADERS, attach
from specserve.service.proposers.medusa import MedusaHeads
from specserve.service.requests import GenerationRequest
from specserve.service.target import Target

from .cells import Cell, save_tiny_llama
from .heads import deepseek_files, eagle3_files, eagle_files, medusa_files, write_head

LAYERS = 6
LEANING = 0.005
BADLY = 0.05
NAMES: tuple[AttachedName, ...] = ("eagle", "eagle3", "medusa", "mtp")
WITH_ROWS: tuple[AttachedName, ...] = ("eagle", "eagle3", "mtp")


class HeadsCell(Cell):
    """A cell whose target has one head of every family beside it; `trees` as in `attach`."""

    def __init__(self, folder: Path, trees: bool = True) -> None:
        super().__init__(save_tiny_llama(folder / "target", 1, layers=LAYERS), draft=folder / "target")
        self.trees = trees
        self.folders: dict[AttachedName, Path] = {
            "eagle": eagle_files(folder / "eagle", self.model)[0],
            "eagle3": eagle3_files(folder / "eagle3", self.model, (2, 3, 3))[0],
            "medusa": medusa_files(folder / "medusa", self.model)[0],
            "mtp": deepseek_files(folder / "mtp", self.model, LAYERS)[0],
        }

    def target(
        self, num_pages: int, page_tokens: int, ports: dict[str, ProposerPort], executor: ThreadPoolExecutor
    ) -> Target:
        made, features = self._attached(self.folders, num_pages, page_tokens)
        ports.update({name: InlineProposerPort(one, executor, needs_pages=True) for name, one in made.items()})
        return Target(self.model, num_pages, page_tokens, features)

    def one(self, name: AttachedName, num_pages: int, page_tokens: int) -> tuple[Proposer, FeaturePages]:
        """Return one head's proposer and the pages it reads."""
        made, features = self._attached({name: self.folders[name]}, num_pages, page_tokens)
        assert features is not None
        return made[name], features

    def _attached(
        self, folders: Mapping[AttachedName, Path], num_pages: int, page_tokens: int
    ) -> tuple[dict[str, Proposer], FeaturePages | None]:
        return attach(folders, self.model, head_of(self.model), num_pages, page_tokens, self.trees)


class LeaningCell(HeadsCell):
    """A cell whose next token depends mostly on the last one, and whose EAGLE and MTP heads look mostly at that, badly:
    their best tokens are often right, and often the next best ones are."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        whole = LlamaForCausalLM.from_pretrained(folder / "target", dtype=torch.float64)
        _lean(dict(whole.named_parameters()))
        whole.save_pretrained(folder / "target")
        self.model = load_model(folder / "target", torch.float64)
        for name, join, (head, tensors) in (
            ("eagle", "fc.weight", eagle_files(folder / "eagle", self.model)),
            ("mtp", f"model.layers.{LAYERS}.eh_proj.weight", deepseek_files(folder / "mtp", self.model, LAYERS)),
        ):
            _lean(tensors)
            hidden = len(tensors[join])
            noise = torch.randn(hidden, hidden, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
            rest = tensors[join][:, hidden:]
            tensors[join] = torch.cat([torch.eye(hidden, dtype=torch.float64) + BADLY * noise, LEANING * rest], 1)
            tensors.pop("fc.bias", None)
            config = json.loads((head / "config.json").read_text()) | {"bias": False}
            write_head(head, config, tensors, "pytorch_model.bin" if name == "eagle" else "model.safetensors")


def _lean(tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            with torch.no_grad():
                tensor.mul_(LEANING)


def head_requests(sampling: Sampling, count: int = 4, max_tokens: int = 20) -> list[GenerationRequest]:
    """Return requests of several lengths, of which some share their first tokens."""
    shared = tuple(range(40, 52))
    prompts = [
        shared[: 4 * (index % 4)] + tuple((7 * index + 3 * p) % 50 + 10 for p in range(1 + 3 * index))
        for index in range(count)
    ]
    return [
        GenerationRequest(f"r{index}", prompt, sampling, max_tokens, ignore_eos=True)
        for index, prompt in enumerate(prompts)
    ]


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
