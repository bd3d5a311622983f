"""`specserve train`: the recipes from the command line."""

import argparse
import dataclasses

from .base import NUM_TASKS, TARGET_RECIPE, VOCAB_SIZE, train_base
from .dataset import Dataset, embedded_dataset, text_dataset
from .distill import DRAFT_RECIPE, train_draft
from .eagle3 import EAGLE3_RECIPE, train_eagle3
from .loop import Recipe


def run(args: argparse.Namespace) -> int:
    """Train what `args.recipe` names and print where it is; returns the exit code."""
    if args.recipe == "base":
        point = train_base(args.run_dir, args.output, with_steps(TARGET_RECIPE, args.steps))
    elif args.recipe == "eagle3":
        recipe = with_steps(EAGLE3_RECIPE, args.steps)
        point = train_eagle3(args.target, _dataset(args), args.run_dir, args.output, recipe)
    else:
        point = train_draft(args.target, args.run_dir, args.output, with_steps(DRAFT_RECIPE, args.steps))
    print(f"{args.output}: {point.step} steps, loss {point.loss:.3f} nats a token, {point.trained_s:.0f} s")
    return 0


def _dataset(args: argparse.Namespace) -> Dataset:
    """Return the user's own text, in the target's tokens, or what the embedded family was trained on."""
    if args.data:
        return text_dataset(args.target, args.data, args.run_dir)
    return embedded_dataset(args.run_dir, VOCAB_SIZE, NUM_TASKS, TARGET_RECIPE.seed)


def with_steps(recipe: Recipe, num_steps: int | None) -> Recipe:
    """Return `recipe` cut or stretched to `num_steps`; unchanged when that is None."""
    return recipe if num_steps is None else dataclasses.replace(recipe, num_steps=num_steps)
