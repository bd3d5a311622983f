"""What the recipes of drafting heads share: the frozen target's labels, rows unrolled in training, held-out drafts."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from ..proposers.head_block import Attend
from .dataset import Dataset
from .loop import Point, Recipe, TokenIds, TokenStream, train

NUM_WINDOWS, WINDOW_TOKENS, WINDOWS_AT_ONCE = 64, 513, 8
Shares = tuple[float, ...]
"""For drafts of 1, 2, ... tokens, the share of held-out positions where the target would accept them whole."""


class UnrolledHead(Protocol):
    """A head whose rows go on from its own hidden states (`RowHead`), as a module."""

    @property
    def taps(self) -> tuple[int, ...]: ...
    @property
    def token_map(self) -> torch.Tensor | None: ...
    def fuse(self, taps: torch.Tensor) -> torch.Tensor: ...
    def __call__(
        self, hidden: torch.Tensor, embedded: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class Labelled(nn.Module):
    """The frozen target: hidden states at the taps, and the distribution of the next token."""

    def __init__(self, target: Any, taps: tuple[int, ...]) -> None:
        super().__init__()
        self._target = target
        self._taps = taps

    @torch.no_grad()
    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return taps [batch, tokens, taps * hidden], logits [batch, tokens, vocab], embeddings of `ids`."""
        out = self._target(input_ids=ids, use_cache=False, output_hidden_states=True)
        states = torch.cat([out.hidden_states[tap] for tap in self._taps], -1)
        return states, out.logits, self._target.get_input_embeddings()(ids)


def frozen_target(target_dir: Path) -> Any:
    """Return the model in `target_dir` in float32, not to be trained."""
    return AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval().requires_grad_(False)


def train_head(
    head: nn.Module,
    loss_fn: Callable[[torch.Tensor], torch.Tensor],
    matches_fn: Callable[[torch.Tensor], torch.Tensor],
    dataset: Dataset,
    recipe: Recipe,
    run_dir: Path,
) -> tuple[Point, Shares]:
    """Train `head` in place; return where it ended and what of its drafts the target would accept."""
    point = train(head, loss_fn, TokenStream(dataset.train_ids, recipe.seed), recipe, run_dir / recipe.name)
    head.eval()
    found = [matches_fn(part) for part in held_out_windows(dataset.held_out_ids).split(WINDOWS_AT_ONCE)]
    return point, tuple(torch.stack(found).mean(0).tolist())


def training_record(point: Point, shares: Shares) -> dict[str, Any]:
    """Return what a head's configuration says of its training."""
    return {"specserve_training": {"steps": point.step, "loss": point.loss, "held_out_matches": list(shares)}}


def held_out_windows(ids: TokenIds) -> torch.Tensor:
    """Return up to `NUM_WINDOWS` windows of held-out text, [windows, tokens]; of little text a single short one."""
    width = min(WINDOW_TOKENS, len(ids))
    count = min(NUM_WINDOWS, len(ids) // width)
    return torch.from_numpy(ids[: count * width].astype(np.int64)).view(count, width)


@dataclass(slots=True)
class Unrolled:
    """Attention of training-time test: rows of step k see all earlier rows of step 0 and their own of steps 1 to k.

    Shapes: keys and values [batch, tokens, kv_heads, dim], one entry a step.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return [batch, tokens, heads, dim] after taking this step's keys and values in."""
        self.keys.append(key)
        self.values.append(value)
        group = query.shape[2] // key.shape[2]
        keys = [some.repeat_interleave(group, 2) for some in self.keys]
        values = [some.repeat_interleave(group, 2) for some in self.values]
        tokens = query.shape[1]
        causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        first = torch.einsum("bqhd,bkhd->bhqk", query, keys[0]).masked_fill(~causal, float("-inf"))
        later = [(query * some).sum(-1).transpose(1, 2).unsqueeze(-1) for some in keys[1:]]
        weights = (torch.cat([first, *later], -1) * query.shape[-1] ** -0.5).softmax(-1)
        mixed = torch.einsum("bhqk,bkhd->bqhd", weights[..., :tokens], values[0])
        for place, some in enumerate(values[1:]):
            mixed = mixed + weights[..., tokens + place].transpose(1, 2).unsqueeze(-1) * some
        return mixed


def unrolled_loss(
    head: UnrolledHead, labelled: Labelled, ids: torch.Tensor, num_steps: int, weight: float
) -> torch.Tensor:
    """Return the weighted cross entropy of `num_steps` unrolled rows at every position of `ids` [batch, tokens].

    Row i of step s stands for the token at i + 1 + s, weighs `weight`^s, and is taught the target's distribution there,
    restricted to the head's vocabulary; positions whose likeliest token lies outside it teach nothing.
    Source: training-time test, arXiv 2503.01840; for MTP arXiv 2509.18362.
    """
    states, logits, embedded = labelled(ids)
    taught = torch.ones(ids.shape, dtype=torch.bool)
    if head.token_map is not None:
        known = torch.zeros(logits.shape[-1], dtype=torch.bool).index_fill(0, head.token_map, True)
        taught = known[logits.argmax(-1)]
        logits = logits[..., head.token_map]
    labels = logits.softmax(-1)
    tokens = ids.shape[1] - num_steps
    positions = torch.arange(tokens)
    hidden = head.fuse(states[:, :tokens])
    memory = Unrolled([], [])
    total = hidden.new_zeros(())
    for step in range(num_steps):
        span = slice(1 + step, 1 + step + tokens)
        predicted, hidden = head(hidden, embedded[:, span], positions + step, memory.attend)
        entropy = -(labels[:, span] * functional.log_softmax(predicted, -1)).sum(-1)
        total = total + weight**step * (entropy * taught[:, span]).sum() / taught[:, span].sum().clamp(min=1)
    return total / sum(weight**step for step in range(num_steps))


@torch.no_grad()
def unrolled_matches(head: UnrolledHead, labelled: Labelled, ids: torch.Tensor, num_steps: int) -> torch.Tensor:
    """Return the shares of drafts of 1 to `num_steps` tokens that the target would accept whole, [num_steps]."""
    states, logits, embedded = labelled(ids)
    tokens = ids.shape[1] - num_steps
    hidden = head.fuse(states[:, :tokens])
    memory = Unrolled([], [])
    drafted = []
    for step in range(num_steps):
        span = slice(1 + step, 1 + step + tokens)
        predicted, hidden = head(hidden, embedded[:, span], torch.arange(tokens) + step, memory.attend)
        best = predicted.argmax(-1)
        drafted.append(best if head.token_map is None else head.token_map[best])
    return accepted_shares(drafted, logits.argmax(-1), ids)


def accepted_shares(drafted: list[torch.Tensor], best: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the share of positions where `drafted` 1, 2, ... tokens, each [batch, positions], are all the target's.

    The token at i + 2 + s is the one that `drafted[s]` guesses at i; `best` [batch, tokens] are the target's own next
    tokens. Only positions count whose text is what the target itself would have written next, token by token.
    """
    tokens = drafted[0].shape[1]
    followed = torch.ones_like(drafted[0], dtype=torch.bool)
    matched = torch.ones_like(followed)
    shares = []
    for step, guessed in enumerate(drafted):
        span = slice(1 + step, 1 + step + tokens)
        followed &= step == 0 or ids[:, span] == best[:, step : step + tokens]
        matched &= guessed == best[:, span]
        shares.append((matched & followed).sum() / followed.sum().clamp(min=1))
    return torch.stack(shares)
