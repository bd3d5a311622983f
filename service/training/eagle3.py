"""The recipe of an EAGLE-3 head: training-time test, the target's distributions as labels. Source: arXiv 2503.01840."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..proposers.eagle3 import Eagle3Config, Eagle3Head, save_eagle3
from .dataset import Dataset
from .heads import Labelled, Shares, frozen_target, train_head, training_record, unrolled_loss, unrolled_matches
from .loop import Phase, Point, Recipe

EAGLE3_RECIPE = Recipe(
    name="eagle3",
    seed=20_261_202,
    num_steps=900,
    batch_tokens=2048,
    lr=3e-3,
    weight_decay=0.05,
    warmup_steps=40,
    phases=(Phase(512, 1.0, 1),),
)
NUM_TTT_STEPS = 4
"""Drafted rows unrolled in training; the paper uses 7 for drafts twice as long."""

STEP_WEIGHT = 0.8
DRAFT_VOCAB = 2560


def train_eagle3(
    target_dir: Path, dataset: Dataset, run_dir: Path, output_dir: Path, recipe: Recipe = EAGLE3_RECIPE
) -> tuple[Point, Shares]:
    """Train a head for the target in `target_dir` and write it to `output_dir`; resumes from `run_dir`."""
    target = frozen_target(target_dir)
    torch.manual_seed(recipe.seed)
    head = new_head(target, dataset)
    labelled = Labelled(target, head.taps)
    point, shares = train_head(
        head,
        lambda ids: unrolled_loss(head, labelled, ids, NUM_TTT_STEPS, STEP_WEIGHT),
        lambda ids: unrolled_matches(head, labelled, ids, NUM_TTT_STEPS),
        dataset,
        recipe,
        run_dir,
    )
    save_eagle3(head, output_dir, training_record(point, shares))
    return point, shares


def new_head(target: Any, dataset: Dataset) -> Eagle3Head:
    """Return an untrained head: the target's layer shape, its head's rows for the commonest tokens of the data.

    The third tap lies three layers below the top of a deep target, as published, and nearer to it in a shallow one.
    """
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
        taps=(2, layers // 2, layers - min(3, max(1, layers // 10))),
        eps=shape.rms_norm_eps,
    )
    head = Eagle3Head(config)
    head.d2t.copy_(chosen - torch.arange(len(chosen)))
    with torch.no_grad():
        head.lm_head.weight.copy_(target.get_output_embeddings().weight[chosen])
        head.fc.weight.mul_(0.1)
        head.fc.weight[:, -shape.hidden_size :] += torch.eye(shape.hidden_size)
    return head
