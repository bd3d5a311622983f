"""`specserve train`: the recipes from the command line."""

import argparse
import dataclasses

from .base import TARGET_RECIPE, train_base
from .distill import DRAFT_RECIPE, train_draft
from .loop import Recipe


def run(args: argparse.Namespace) -> int:
    """Train what `args.recipe` names and print where it is; returns the exit code."""
    if args.recipe == "base":
        point = train_base(args.run_dir, args.output, with_steps(TARGET_RECIPE, args.steps))
    else:
        point = train_draft(args.target, args.run_dir, args.output, with_steps(DRAFT_RECIPE, args.steps))
    print(f"{args.output}: {point.step} steps, loss {point.loss:.3f} nats a token, {point.trained_s:.0f} s")
    return 0


def with_steps(recipe: Recipe, num_steps: int | None) -> Recipe:
    """Return `recipe` cut or stretched to `num_steps`; unchanged when that is None."""
    return recipe if num_steps is None else dataclasses.replace(recipe, num_steps=num_steps)
