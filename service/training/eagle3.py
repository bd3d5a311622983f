"""The recipe of an EAGLE-3 head: training-time test, the target's distributions as labels. Source: arXiv 2503.01840."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from ..proposers.eagle3 import Eagle3Config, Eagle3Head, save_eagle3
from .dataset import Dataset
from .loop import Phase, Point, Recipe, TokenStream, train

EAGLE3_RECIPE = Recipe(
    name="eagle3",
    seed=20_261_202,
    num_steps=900,
    batch_tokens=4096,
    lr=3e-3,
    weight_decay=0.05,
    warmup_steps=40,
    phases=(Phase(512, 1.0, 1),),
)
NUM_TTT_STEPS = 4
"""Drafted rows unrolled in training; the paper uses 7 for drafts twice as long."""

STEP_WEIGHT = 0.8
DRAFT_VOCAB = 2048


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


def train_eagle3(
    target_dir: Path, dataset: Dataset, run_dir: Path, output_dir: Path, recipe: Recipe = EAGLE3_RECIPE
) -> Point:
    """Train a head for the target in `target_dir` and write it to `output_dir`; resumes from `run_dir`."""
    target = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval().requires_grad_(False)
    torch.manual_seed(recipe.seed)
    head = new_head(target, dataset)
    labelled = Labelled(target, head.config.taps)
    loss_fn = torch.compile(lambda ids: training_time_test_loss(head, labelled, ids), dynamic=False)
    point = train(head, loss_fn, TokenStream(dataset.train_ids, recipe.seed), recipe, run_dir / recipe.name)
    ids = torch.from_numpy(dataset.held_out_ids[: 64 * 513].astype(np.int64)).view(64, 513)
    held_out = [held_out_matches(head, labelled, part) for part in ids.split(8)]
    shares = torch.stack(held_out).mean(0).tolist()
    extra = {"specserve_training": {"steps": point.step, "loss": point.loss, "held_out_matches": shares}}
    save_eagle3(head.eval(), output_dir, extra)
    return point


def new_head(target: Any, dataset: Dataset) -> Eagle3Head:
    """Return an untrained head: the target's layer shape, its head's rows for the commonest tokens of the data."""
    shape = target.config
    vocab = int(shape.vocab_size)
    counts = np.bincount(dataset.train_ids, minlength=vocab)
    chosen = torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[: min(DRAFT_VOCAB, vocab)]).copy())
    layers = int(shape.num_hidden_layers)
    config = Eagle3Config(
        hidden=shape.hidden_size,
        target_hidden=shape.hidden_size,
        heads=shape.num_attention_heads,
        kv_heads=shape.num_key_value_heads,
        head_dim=getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads,
        intermediate=2 * shape.hidden_size,
        draft_vocab=len(chosen),
        vocab=vocab,
        taps=(2, layers // 2, layers - 3),
        eps=shape.rms_norm_eps,
    )
    head = Eagle3Head(config)
    head.d2t.copy_(chosen - torch.arange(len(chosen)))
    with torch.no_grad():
        head.lm_head.weight.copy_(target.get_output_embeddings().weight[chosen])
        head.fc.weight.mul_(0.1)
        head.fc.weight[:, -shape.hidden_size :] += torch.eye(shape.hidden_size)
    return head


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


def training_time_test_loss(head: Eagle3Head, labelled: Labelled, ids: torch.Tensor) -> torch.Tensor:
    """Return the weighted cross entropy of `NUM_TTT_STEPS` unrolled rows at every position of `ids` [batch, tokens].

    Row i of step s stands for the token at i + 1 + s and is taught the target's distribution there, restricted to the
    draft vocabulary; positions whose likeliest token lies outside it teach nothing.
    """
    states, logits, embedded = labelled(ids)
    draft_ids = head.target_ids(torch.arange(head.config.draft_vocab))
    known = torch.zeros(head.config.vocab, dtype=torch.bool).index_fill(0, draft_ids, True)
    taught = known[logits.argmax(-1)]
    labels = logits[..., draft_ids].softmax(-1)
    tokens = ids.shape[1] - NUM_TTT_STEPS
    positions = torch.arange(tokens)
    hidden = head.fuse(states[:, :tokens])
    memory = Unrolled([], [])
    total = hidden.new_zeros(())
    for step in range(NUM_TTT_STEPS):
        span = slice(1 + step, 1 + step + tokens)
        predicted, hidden = head(hidden, embedded[:, span], positions + step, memory.attend)
        entropy = -(labels[:, span] * functional.log_softmax(predicted, -1)).sum(-1)
        total = total + STEP_WEIGHT**step * (entropy * taught[:, span]).sum() / taught[:, span].sum().clamp(min=1)
    return total / sum(STEP_WEIGHT**step for step in range(NUM_TTT_STEPS))


@torch.no_grad()
def held_out_matches(head: Eagle3Head, labelled: Labelled, ids: torch.Tensor) -> torch.Tensor:
    """Return, for drafts of 1 to `NUM_TTT_STEPS` tokens, the share of positions where the target would accept them all.

    Only positions count whose text is what the target itself would have written next, token by token.
    """
    states, logits, embedded = labelled(ids)
    best = logits.argmax(-1)
    tokens = ids.shape[1] - NUM_TTT_STEPS
    hidden = head.fuse(states[:, :tokens])
    memory = Unrolled([], [])
    followed = torch.ones(ids.shape[0], tokens, dtype=torch.bool)
    matched = torch.ones_like(followed)
    shares = []
    for step in range(NUM_TTT_STEPS):
        span = slice(1 + step, 1 + step + tokens)
        predicted, hidden = head(hidden, embedded[:, span], torch.arange(tokens) + step, memory.attend)
        followed &= step == 0 or ids[:, span] == best[:, step : step + tokens]
        matched &= head.target_ids(predicted.argmax(-1)) == best[:, span]
        shares.append((matched & followed).sum() / followed.sum().clamp(min=1))
    return torch.stack(shares)
