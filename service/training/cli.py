"""`specserve train`: the recipes from the command line."""

import argparse
import dataclasses

from ..errors import BadRequestError
from ..models import embedded_dir, load_tokenizer
from .base import NUM_TASKS, TARGET_RECIPE, VOCAB_SIZE, train_base
from .dataset import Dataset, embedded_dataset, text_dataset
from .distill import DRAFT_RECIPE, train_draft
from .eagle3 import EAGLE3_RECIPE, train_eagle3
from .layer_skip import tune_layer_skip
from .loop import Recipe
from .medusa import MEDUSA_RECIPE, train_medusa
from .mtp import MTP_RECIPE, train_mtp

HEADS = {
    "eagle3": (EAGLE3_RECIPE, train_eagle3),
    "medusa": (MEDUSA_RECIPE, train_medusa),
    "mtp": (MTP_RECIPE, train_mtp),
}

NUM_TRIALS = 200


def run(args: argparse.Namespace) -> int:
    """Train what `args.recipe` names and print where it is; returns the exit code."""
    if args.recipe == "layer_skip":
        return _tune(args)
    if args.recipe == "base":
        point = train_base(args.run_dir, args.output, with_steps(TARGET_RECIPE, args.steps))
    elif args.recipe in HEADS:
        recipe, train_head = HEADS[args.recipe]
        recipe = with_steps(recipe, args.steps)
        point, shares = train_head(args.target, _dataset(args), args.run_dir, args.output, recipe)
        listed = ", ".join(f"{share:.1%}" for share in shares)
        print(f"held-out drafts that the target accepts whole, of 1, 2, ... tokens: {listed}")
    else:
        point = train_draft(args.target, args.run_dir, args.output, with_steps(DRAFT_RECIPE, args.steps))
    print(f"{args.output}: {point.step} steps, loss {point.loss:.3f} nats a token, {point.trained_s:.0f} s")
    return 0


def _tune(args: argparse.Namespace) -> int:
    rating = tune_layer_skip(args.target, args.data, args.output, args.steps or NUM_TRIALS)
    worth = f"{rating.gain:.2f} tokens for the time of one, with drafts of {rating.gamma}"
    print(f"{args.output}: {worth}; {'use it with --layer-skip' if rating.gain > 1 else 'drafting so does not pay'}")
    return 0


def _dataset(args: argparse.Namespace) -> Dataset:
    """Return the user's own text, in the target's tokens, or what the embedded family was trained on.

    Raises: BadRequestError when there is no text and the target has other tokens than the embedded family.
    """
    if args.data:
        return text_dataset(args.target, args.data, args.run_dir)
    tokenizer = load_tokenizer(args.target)
    if tokenizer.get_vocab() != load_tokenizer(embedded_dir("target")).get_vocab():
        raise BadRequestError(f"{args.target} has a tokenizer of its own; name text for it with --data", "data")
    return embedded_dataset(args.run_dir, VOCAB_SIZE, NUM_TASKS, TARGET_RECIPE.seed, tokenizer)


def with_steps(recipe: Recipe, num_steps: int | None) -> Recipe:
    """Return `recipe` cut or stretched to `num_steps`; unchanged when that is None."""
    return recipe if num_steps is None else dataclasses.replace(recipe, num_steps=num_steps)
