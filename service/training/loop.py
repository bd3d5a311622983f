"""One training loop for every recipe: seeded batches, progress bar, checkpoints it can resume from."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from tqdm import tqdm

from .optim import learning_rate, optimizers, set_learning_rate

TokenIds = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
LossFn = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of training at one sequence length; `share` is its part of all steps."""

    sequence_tokens: int
    share: float
    micro_batches: int


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides what a run computes; written beside the weights."""

    name: str
    seed: int
    num_steps: int
    batch_tokens: int
    lr: float
    weight_decay: float
    warmup_steps: int
    phases: tuple[Phase, ...]
    checkpoint_every_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Point:
    """Where a run stands: `loss` is the mean of the last steps, in nats a token."""

    step: int
    loss: float
    trained_s: float


class TokenStream:
    """Deals windows of one long token array in a seeded order that depends on the step alone, so runs can resume."""

    def __init__(self, token_ids: TokenIds, seed: int) -> None:
        self._token_ids = token_ids
        self._seed = seed

    def batch(self, step: int, num_sequences: int, sequence_tokens: int) -> torch.Tensor:
        """Return `[num_sequences, sequence_tokens + 1]` int64: epochs of shuffled windows, shifted each epoch."""
        num_windows = (len(self._token_ids) - 1) // sequence_tokens - 1
        rows = []
        for index in range(step * num_sequences, (step + 1) * num_sequences):
            epoch, place = divmod(index, num_windows)
            order = np.random.default_rng((self._seed, epoch, sequence_tokens))
            shift = int(order.integers(sequence_tokens))
            window = int(order.permutation(num_windows)[place])
            start = window * sequence_tokens + shift
            rows.append(self._token_ids[start : start + sequence_tokens + 1].astype(np.int64))
        return torch.from_numpy(np.stack(rows))


def phase_at(recipe: Recipe, step: int) -> Phase:
    """Return the phase that `step` belongs to."""
    done = 0.0
    for phase in recipe.phases:
        done += phase.share
        if step < round(done * recipe.num_steps):
            return phase
    return recipe.phases[-1]


def train(model: nn.Module, loss_fn: LossFn, stream: TokenStream, recipe: Recipe, run_dir: Path) -> Point:
    """Train `model` in place and return where it ended; resumes from `run_dir` when a checkpoint is there.

    `loss_fn` maps `[batch, tokens + 1]` ids to the mean loss in nats a token. Checkpoints are replaced atomically.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "recipe.json").write_text(json.dumps(asdict(recipe), indent=1))
    found = optimizers(model, recipe.lr, recipe.weight_decay)
    step, trained_s = _resume(model, found, run_dir)
    recent: list[float] = []
    saved = time.monotonic()
    with tqdm(total=recipe.num_steps, initial=step, desc=recipe.name, unit="step", mininterval=2.0) as bar:
        while step < recipe.num_steps:
            started = time.monotonic()
            set_learning_rate(found, learning_rate(step, recipe.num_steps, recipe.lr, recipe.warmup_steps))
            recent = [*recent[-49:], _step(model, loss_fn, stream, recipe, step, found)]
            step += 1
            trained_s += time.monotonic() - started
            bar.update()
            bar.set_postfix(loss=f"{np.mean(recent):.3f}")
            if time.monotonic() - saved > recipe.checkpoint_every_s:
                _save(model, found, run_dir, step, trained_s)
                saved = time.monotonic()
    _save(model, found, run_dir, step, trained_s)
    return Point(step, float(np.mean(recent)) if recent else float("nan"), trained_s)


def _step(
    model: nn.Module,
    loss_fn: LossFn,
    stream: TokenStream,
    recipe: Recipe,
    step: int,
    found: list[torch.optim.Optimizer],
) -> float:
    phase = phase_at(recipe, step)
    num_sequences = recipe.batch_tokens // phase.sequence_tokens
    batch = stream.batch(step, num_sequences, phase.sequence_tokens)
    total = 0.0
    for part in batch.chunk(phase.micro_batches):
        loss = loss_fn(part) / phase.micro_batches
        loss.backward()
        total += float(loss.detach())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in found:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return total


def _save(model: nn.Module, found: list[torch.optim.Optimizer], run_dir: Path, step: int, trained_s: float) -> None:
    state = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in found],
        "step": step,
        "trained_s": trained_s,
    }
    partial = run_dir / "checkpoint.partial"
    torch.save(state, partial)
    os.replace(partial, run_dir / "checkpoint.pt")


def _resume(model: nn.Module, found: list[torch.optim.Optimizer], run_dir: Path) -> tuple[int, float]:
    path = run_dir / "checkpoint.pt"
    if not path.exists():
        return 0, 0.0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(found, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return int(state["step"]), float(state["trained_s"])
