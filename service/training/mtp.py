"""The recipe of an MTP module: one layer looped, all else of the target frozen. Source: FastMTP, arXiv 2509.18362."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from ..proposers.head_block import BlockShape
from ..proposers.mtp import MtpHead, save_mtp
from .dataset import Dataset
from .heads import Labelled, Shares, frozen_target, train_head, training_record, unrolled_loss, unrolled_matches
from .loop import Phase, Point, Recipe

MTP_RECIPE = Recipe(
    name="mtp",
    seed=20_261_204,
    num_steps=450,
    batch_tokens=2048,
    lr=3e-3,
    weight_decay=0.05,
    warmup_steps=40,
    phases=(Phase(512, 1.0, 1),),
)
NUM_LOOPS = 3
LOOP_WEIGHT = 0.6


def train_mtp(
    target_dir: Path, dataset: Dataset, run_dir: Path, output_dir: Path, recipe: Recipe = MTP_RECIPE
) -> tuple[Point, Shares]:
    """Train a module for the target in `target_dir` and write it to `output_dir`; resumes from `run_dir`."""
    target = frozen_target(target_dir)
    torch.manual_seed(recipe.seed)
    head = new_module(target)
    labelled = Labelled(target, head.taps)
    point, shares = train_head(
        head,
        lambda ids: unrolled_loss(head, labelled, ids, NUM_LOOPS, LOOP_WEIGHT),
        lambda ids: unrolled_matches(head, labelled, ids, NUM_LOOPS),
        dataset,
        recipe,
        run_dir,
    )
    save_mtp(head, output_dir, int(target.config.num_hidden_layers), training_record(point, shares))
    return point, shares


def new_module(target: Any) -> MtpHead:
    """Return an untrained module of the target's layer shape, which begins as the target's hidden state passed on."""
    shape = target.config
    hidden = int(shape.hidden_size)
    head_dim = getattr(shape, "head_dim", None) or hidden // shape.num_attention_heads
    block = BlockShape(
        hidden, hidden, shape.num_attention_heads, shape.num_key_value_heads, head_dim, 2 * hidden, head_dim,
        shape.rms_norm_eps,
    )  # fmt: skip
    readout = partial(functional.linear, weight=target.get_output_embeddings().weight)
    head = MtpHead(block, int(shape.num_hidden_layers), int(shape.vocab_size), readout)
    with torch.no_grad():
        head.join.weight.mul_(0.1)
        head.join.weight[:, hidden:] += torch.eye(hidden)
    return head
