"""Medusa heads: each guesses one token further, all from one hidden state of the target. Source: arXiv 2401.10774.

Head i reads the target's last hidden state at position t and guesses the token at t + 2 + i. Medusa-1 and Medusa-2
share their form; a Medusa-2 file may hold the heads under `medusa_head.`. A configuration that says `original_lm_head`,
as vLLM's may, makes the target's own head the readout of all. A chain gets each head's best token, a tree several ones
of each (`rank_tree.py`).
"""

import functools
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from ..errors import ModelUnsupportedError
from ..features import FeaturePages
from ..messages import Draft, DraftBatch, ProposeBatch, ProposeRow
from ..models import LoadedModel
from ..packed_linear import Head
from .checkpoint import check_target, fill, read_config, read_tensors, without_copies
from .choosing import Chain, extend
from .paged_block import packed
from .rank_tree import Accuracies, RankTree, likeliest_tree, stated_accuracies

LOG = logging.getLogger(__name__)
FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors", "pytorch_model.bin")
PREFIX = "medusa_head."
VLLM_NAMES = (
    (r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", r"medusa_head.\1.\2.linear.\3"),
    (r"lm_heads\.(\d+)\.weight", r"medusa_head.\1.last.weight"),
)
"""How vLLM's own layout spells the same tensors."""
SHARED = ("lm_head.weight", "lm_heads.0.weight")
"""Where vLLM's files repeat the readout that `original_lm_head` shares."""


class ResBlock(nn.Module):
    """x + SiLU(W x + b), the identity before training."""

    def __init__(self, hidden: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden, bias=bias)
        for parameter in self.linear.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., hidden]."""
        out: torch.Tensor = x + functional.silu(self.linear(x))
        return out


class MedusaHeads(nn.Module):
    """Independent heads; keys are `medusa_head.{i}.{j}.linear.*` and `medusa_head.{i}.{num_layers}.weight`.

    With a `readout`, the target's head, they are residual blocks alone, and have no keys of the second kind.
    """

    def __init__(
        self, num_heads: int, num_layers: int, hidden: int, vocab: int, tap: int, bias: bool = True,
        readout: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_layers = num_layers
        self.hidden = hidden
        self.vocab = vocab
        self.taps = (tap,)
        self.accuracies: Accuracies = stated_accuracies({}, num_heads)
        self.shared = readout is not None
        self._readout = readout
        self.medusa_head = nn.ModuleList()
        for _ in range(num_heads):
            own = [] if self.shared else [nn.Linear(hidden, vocab, bias=False)]
            self.medusa_head.append(nn.Sequential(*(ResBlock(hidden, bias) for _ in range(num_layers)), *own))

    def forward(self, hidden: torch.Tensor, index: int) -> torch.Tensor:
        """Return head `index`'s logits [..., vocab] for the target's hidden states after the final norm."""
        out: torch.Tensor = self.medusa_head[index](hidden)
        return out if self._readout is None else self._readout(out)


@dataclass(slots=True)
class _Ranked:
    """A tree being filled in: `best` holds the best tokens of each head that was asked, by rank."""

    row: ProposeRow
    tree: RankTree
    best: list[list[int]] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """True when every head that the tree has nodes of was asked."""
        return len(self.best) > max(self.tree.heads, default=-1)

    def draft(self) -> Draft:
        """Return the finished message."""
        tokens = tuple(self.best[head][rank] for head, rank in zip(self.tree.heads, self.tree.ranks, strict=True))
        return Draft(self.row.request_id, self.row.committed_len, tokens, parents=self.tree.parents)


class MedusaProposer:
    """Drafts with `trees` trees for greedy requests, else chains of as many tokens as there are heads; keeps nothing.

    A sampled request gets a chain, whose tokens share the target's noise: they guess what the target will draw.
    """

    name = "medusa"

    def __init__(self, heads: MedusaHeads, features: FeaturePages, trees: bool = False) -> None:
        self._heads = heads
        self._features = features
        self._trees = trees
        self._tree_of = functools.cache(functools.partial(likeliest_tree, heads.accuracies))
        self._num_ranks = max(map(len, heads.accuracies))
        packed(heads)

    @torch.inference_mode()
    def propose(self, batch: ProposeBatch) -> DraftBatch:
        """Return a draft for every row with at least two tokens, the least that a hidden state stands behind."""
        rows = [row for row in batch.rows if row.committed_len > 1]
        if not rows:
            return DraftBatch(batch.round, (), 0)
        growing = [self._seed(row) for row in rows]
        places = [row.moved_from[-1] if row.moved_from else row.committed_len - 2 for row in rows]
        states = [
            self._features.read(row.block_table, (place,), self._heads.taps)
            for row, place in zip(rows, places, strict=True)
        ]
        hidden = torch.cat(states)
        active = list(range(len(growing)))
        for index in range(len(self._heads.medusa_head)):
            active = [place for place in active if not growing[place].complete]
            if not active:
                break
            some = hidden if len(active) == len(rows) else hidden[torch.tensor(active, device=hidden.device)]
            _fill([growing[place] for place in active], self._heads(some, index), self._num_ranks)
        return DraftBatch(batch.round, tuple(one.draft() for one in growing), 0)

    def _seed(self, row: ProposeRow) -> Chain | _Ranked:
        return _Ranked(row, self._tree_of(row.gamma)) if self._trees and row.sampling.greedy else Chain(row)


def _fill(growing: Sequence[Chain | _Ranked], logits: torch.Tensor, num_ranks: int) -> None:
    """Give every draft what the next head guesses, whose `logits` are [len(growing), vocab]."""
    chains = {place: one for place, one in enumerate(growing) if isinstance(one, Chain)}
    if chains:
        some = logits if len(chains) == len(growing) else logits[torch.tensor(list(chains), device=logits.device)]
        extend(list(chains.values()), some, drawn=False)
    if len(chains) == len(growing):
        return
    best = logits.topk(num_ranks).indices.tolist()
    for one, tokens in zip(growing, best, strict=True):
        if isinstance(one, _Ranked):
            one.best.append(tokens)


def load_medusa(folder: Path, model: LoadedModel, readout: Head) -> MedusaHeads:
    """Return the heads in `folder`, made for `model`; how many there are is read from the tensors' names.

    `readout` is the model's own head, for heads that share it.

    Raises: ModelUnsupportedError that names missing and unexpected tensors, or says how the heads do not fit.
    """
    stated = read_config(folder)
    check_target(stated, model, folder)
    tensors, shared = read_tensors(folder, files=FILES), bool(stated.get("original_lm_head", False))
    if shared:
        own = model.head.weight
        assert isinstance(own, torch.Tensor)
        tensors = without_copies(tensors, dict.fromkeys(SHARED, own))
    merged = not shared and not any((folder / name).exists() for name in FILES[:2])
    tensors = _own_names(tensors, only_prefixed=merged)
    places = [match.groups() for name in tensors if (match := re.match(r"medusa_head\.(\d+)\.(\d+)\.linear", name))]
    if not places:
        raise ModelUnsupportedError(f"{folder} has no Medusa heads (tensors like 0.0.linear.weight)")
    num_heads, num_layers = (1 + max(int(place[part]) for place in places) for part in (0, 1))
    tensors = {name.replace(".last.", f".{num_layers}."): tensor for name, tensor in tensors.items()}
    bias = "medusa_head.0.0.linear.bias" in tensors
    hidden, tap = int(model.config.hidden_size), int(model.config.num_hidden_layers)
    heads = MedusaHeads(
        num_heads, num_layers, hidden, model.shape.vocab_size, tap, bias, readout if shared else None
    ).to(model.dtype)
    fill(heads, tensors, folder)
    heads.accuracies = stated_accuracies(stated, num_heads)
    LOG.info(
        "Medusa heads %s: %d heads of %d blocks, read after the final norm, readout %s", folder, num_heads, num_layers,
        "the target's" if shared else "their own",
    )  # fmt: skip
    return heads.eval().requires_grad_(False)


def _own_names(tensors: Mapping[str, torch.Tensor], only_prefixed: bool) -> dict[str, torch.Tensor]:
    """Return the heads' tensors under Medusa-2's names; `only_prefixed`: the file holds the whole target, too."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith(PREFIX):
            found[name] = tensor
            continue
        for pattern, spelling in VLLM_NAMES:
            if re.fullmatch(pattern, name):
                found[re.sub(pattern, spelling, name)] = tensor
                break
        else:
            if not (only_prefixed and name.startswith(("model.", "lm_head."))):
                found[PREFIX + name] = tensor
    return found


def save_medusa(heads: MedusaHeads, folder: Path, extra: dict[str, Any]) -> None:
    """Write `heads` as Medusa-1 files are, in bf16 safetensors; `extra` goes into the configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        name.removeprefix(PREFIX): tensor.to(torch.bfloat16).contiguous() for name, tensor in heads.state_dict().items()
    }
    save_file(state, folder / FILES[0])
    stated = {
        "model_type": "medusa",
        "medusa_num_heads": len(heads.medusa_head),
        "medusa_num_layers": heads.num_layers,
        "hidden_size": heads.hidden,
        "vocab_size": heads.vocab,
        "original_lm_head": heads.shared,
    }
    (folder / "config.json").write_text(json.dumps(stated | extra, indent=1) + "\n")
