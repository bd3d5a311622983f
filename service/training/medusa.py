"""The recipe of Medusa-1 heads: the target stays as it is, its own distributions are the labels. Source: 2401.10774.

The heads share the target's readout, as `original_lm_head` says: of each only the residual blocks are trained and kept.
"""

from functools import partial
from pathlib import Path

import torch
from torch.nn import functional

from ..proposers.medusa import MedusaHeads, save_medusa
from ..proposers.rank_tree import NUM_RANKS
from .dataset import Dataset
from .heads import (
    WINDOWS_AT_ONCE,
    Labelled,
    Shares,
    accepted_shares,
    frozen_target,
    held_out_windows,
    train_head,
    training_record,
)
from .loop import Phase, Point, Recipe

MEDUSA_RECIPE = Recipe(
    name="medusa",
    seed=20_261_203,
    num_steps=400,
    batch_tokens=2048,
    lr=3e-3,
    weight_decay=0.05,
    warmup_steps=40,
    phases=(Phase(512, 1.0, 1),),
)
NUM_HEADS = 4
NUM_BLOCKS = 3
HEAD_WEIGHT = 0.8


def train_medusa(
    target_dir: Path, dataset: Dataset, run_dir: Path, output_dir: Path, recipe: Recipe = MEDUSA_RECIPE
) -> tuple[Point, Shares]:
    """Train heads for the target in `target_dir` and write them to `output_dir`; resumes from `run_dir`."""
    target = frozen_target(target_dir)
    torch.manual_seed(recipe.seed)
    shape = target.config
    readout = partial(functional.linear, weight=target.get_output_embeddings().weight)
    heads = MedusaHeads(
        NUM_HEADS, NUM_BLOCKS, shape.hidden_size, shape.vocab_size, int(shape.num_hidden_layers), readout=readout
    )
    labelled = Labelled(target, heads.taps)
    point, shares = train_head(
        heads,
        lambda ids: medusa_loss(heads, labelled, ids),
        lambda ids: medusa_matches(heads, labelled, ids),
        dataset,
        recipe,
        run_dir,
    )
    record = training_record(point, shares)
    record["specserve_training"]["held_out_ranks"] = held_out_ranks(heads, labelled, dataset).tolist()
    save_medusa(heads, output_dir, record)
    return point, shares


def medusa_loss(heads: MedusaHeads, labelled: Labelled, ids: torch.Tensor) -> torch.Tensor:
    """Return the weighted cross entropy of all heads at every position of `ids` [batch, tokens].

    Head i at position t is taught the target's distribution of the token at t + 2 + i.
    """
    states, logits, _ = labelled(ids)
    labels = logits.softmax(-1)
    tokens = ids.shape[1] - NUM_HEADS
    total = states.new_zeros(())
    for index in range(NUM_HEADS):
        predicted = functional.log_softmax(heads(states[:, :tokens], index), -1)
        entropy = -(labels[:, 1 + index : 1 + index + tokens] * predicted).sum(-1).mean()
        total = total + HEAD_WEIGHT**index * entropy
    mean: torch.Tensor = total / sum(HEAD_WEIGHT**index for index in range(NUM_HEADS))
    return mean


@torch.no_grad()
def medusa_matches(heads: MedusaHeads, labelled: Labelled, ids: torch.Tensor) -> torch.Tensor:
    """Return the shares of drafts of 1 to `NUM_HEADS` tokens that the target would accept whole, [NUM_HEADS]."""
    states, logits, _ = labelled(ids)
    tokens = ids.shape[1] - NUM_HEADS
    drafted = [heads(states[:, :tokens], index).argmax(-1) for index in range(NUM_HEADS)]
    return accepted_shares(drafted, logits.argmax(-1), ids)


@torch.no_grad()
def held_out_ranks(heads: MedusaHeads, labelled: Labelled, dataset: Dataset) -> torch.Tensor:
    """Return how often the target's token is each head's best, second best, ... one: [NUM_HEADS, NUM_RANKS].

    Only positions count whose text is what the target itself would have written up to there.
    """
    found = []
    for ids in held_out_windows(dataset.held_out_ids).split(WINDOWS_AT_ONCE):
        states, logits, _ = labelled(ids)
        best = logits.argmax(-1)
        tokens = ids.shape[1] - NUM_HEADS
        followed = torch.ones_like(best[:, :tokens], dtype=torch.bool)
        shares = []
        for index in range(NUM_HEADS):
            followed &= index == 0 or ids[:, 1 + index : 1 + index + tokens] == best[:, index : index + tokens]
            ranked = heads(states[:, :tokens], index).topk(NUM_RANKS).indices
            right = (ranked == best[:, 1 + index : 1 + index + tokens, None]) & followed[..., None]
            shares.append(right.sum((0, 1)) / followed.sum().clamp(min=1))
        found.append(torch.stack(shares))
    return torch.stack(found).mean(0)
