"""Which layers a target leaves out best when it drafts for itself: a seeded search on text. Source: arXiv 2309.08168.

What is maximised is measured: tokens for the time of a plain token, from how long drafts of the target's own text agree
with it, and from what each part of a layer, and a score of several tokens, takes here.
"""

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from tqdm import tqdm

from ..errors import BadRequestError
from ..kernels.native import argmax
from ..messages import ScoreRow
from ..models import LoadedModel, head_of, load_model, load_tokenizer
from ..paged_model import PagedModel
from ..proposers.self_draft import check_layers
from ..skipping import NOTHING, Skip
from .dataset import read_documents
from .heldout import training_code

PAGE = 16
PROMPT_TOKENS, WRITTEN_TOKENS, MAX_TEXTS = 48, 97, 16
MAX_GAMMA = 6
TIMED_CALLS = 15
PATIENCE = 20
"""Trials without a gain after which the search begins anew elsewhere."""


@dataclass(frozen=True, slots=True)
class Rating:
    """What a choice is worth. `survival[k]` is the share of drafts whose first k + 1 tokens are all right.

    `gain` is tokens for the time of a plain token, with drafts of `gamma` tokens; at most 1 means that none pays.
    """

    gain: float
    gamma: int
    draft_cost: float
    survival: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Milliseconds here: `scores[n]` of n + 1 tokens with the head, one attention, one MLP."""

    scores: tuple[float, ...]
    attention: float
    mlp: float

    def draft(self, skip: Skip) -> float:
        """Return what one drafted token takes."""
        return self.scores[0] - len(skip.attention) * self.attention - len(skip.mlp) * self.mlp


class OwnText:
    """What the target writes after some prompts, with its KV; drafts start at every page of that and are compared."""

    def __init__(self, model: LoadedModel, prompts: Sequence[Sequence[int]]) -> None:
        self.num_layers = int(model.config.num_hidden_layers)
        total = PROMPT_TOKENS + WRITTEN_TOKENS
        per_text = -(-total // PAGE)
        starts = range(PROMPT_TOKENS, total - MAX_GAMMA, PAGE)
        self._paged = PagedModel(model, len(prompts) * (per_text + len(starts)), PAGE)
        self._head = head_of(model)
        self._texts = [list(prompt) for prompt in prompts]
        tables = [tuple(range(place * per_text, (place + 1) * per_text)) for place in range(len(prompts))]
        self._write(tables)
        spare = iter(range(len(prompts) * per_text, len(prompts) * (per_text + len(starts))))
        self._starts = [
            (text, start, (*table[: start // PAGE], next(spare)))
            for text, table in zip(self._texts, tables, strict=True)
            for start in starts
        ]

    @torch.inference_mode()
    def _write(self, tables: Sequence[tuple[int, ...]]) -> None:
        fed = 0
        for _ in range(WRITTEN_TOKENS):
            rows = [
                ScoreRow("", fed, tuple(text[fed:]), 1, table) for text, table in zip(self._texts, tables, strict=True)
            ]
            fed = len(self._texts[0])
            for text, token in zip(self._texts, argmax(self._head(self._paged.forward(rows))), strict=True):
                text.append(token)

    @torch.inference_mode()
    def survival(self, skip: Skip) -> tuple[float, ...]:
        """Return the shares of drafts that are right for 1 to `MAX_GAMMA` tokens; each draft has a page of its own."""
        right = self._starts
        shares = []
        for step in range(MAX_GAMMA):
            rows = [ScoreRow("", start + step, (text[start + step],), 1, table) for text, start, table in right]
            drafted = argmax(self._head(self._paged.forward(rows, skip=skip))) if rows else []
            right = [one for one, token in zip(right, drafted, strict=True) if token == one[0][one[1] + step + 1]]
            shares.append(len(right) / len(self._starts))
        return tuple(shares)

    def costs(self) -> StepCosts:
        """Return the costs of steps of one request, measured now."""
        text, start, table = self._starts[0]
        everywhere = frozenset(range(self.num_layers))

        def timed(num_tokens: int, skip: Skip) -> float:
            row = ScoreRow("", start, tuple(text[start : start + num_tokens]), num_tokens, table)
            return _timed(lambda: self._head(self._paged.forward([row], skip=skip)))

        scores = tuple(timed(count, NOTHING) for count in range(1, MAX_GAMMA + 2))
        attention = (scores[0] - timed(1, Skip(attention=everywhere))) / self.num_layers
        mlp = (scores[0] - timed(1, Skip(mlp=everywhere))) / self.num_layers
        return StepCosts(scores, max(attention, 0.0), max(mlp, 0.0))


@torch.inference_mode()
def _timed(call: Callable[[], torch.Tensor]) -> float:
    spent = []
    for _ in range(TIMED_CALLS):
        started = time.perf_counter()
        call()
        spent.append((time.perf_counter() - started) * 1e3)
    return median(spent)


def rate(survival: Sequence[float], skip: Skip, costs: StepCosts) -> Rating:
    """Return what a choice is worth at its best draft length."""
    draft_ms = costs.draft(skip)
    gains = [
        (1 + sum(survival[:gamma])) * costs.scores[0] / (gamma * draft_ms + costs.scores[gamma])
        for gamma in range(1, len(survival) + 1)
    ]
    gain = max(gains)
    return Rating(gain, gains.index(gain) + 1, draft_ms / costs.scores[0], tuple(survival))


def search(
    value: Callable[[Skip], Rating], num_layers: int, num_trials: int, seed: int, progress: bool = True
) -> tuple[Skip, Rating]:
    """Return the best choice found: one or two parts of layers are flipped as long as that gains, then begun anew."""
    draws = random.Random(seed)
    known: dict[Skip, Rating] = {}
    found: tuple[Skip, Rating] | None = None
    current: tuple[Skip, float] = (NOTHING, 0.0)
    idle = 0
    with tqdm(total=num_trials, desc="layer_skip", unit="choice", mininterval=1.0, disable=not progress) as bar:
        for _ in range(num_trials):
            if idle >= PATIENCE:
                current, idle = (_drawn(draws, num_layers), 0.0), 0
            skip = _flipped(current[0], draws, num_layers)
            if skip not in known:
                known[skip] = value(skip)
            rating = known[skip]
            idle += 1
            if rating.gain > current[1]:
                current, idle = (skip, rating.gain), 0
            if found is None or rating.gain > found[1].gain:
                found = skip, rating
                bar.set_postfix(gain=f"{rating.gain:.3f}")
            bar.update()
    assert found is not None
    return found


def _flipped(skip: Skip, draws: random.Random, num_layers: int) -> Skip:
    """Return a neighbour that leaves something out, and something in."""
    while True:
        attention, mlp = set(skip.attention), set(skip.mlp)
        for _ in range(draws.randint(1, 2)):
            draws.choice((attention, mlp)).symmetric_difference_update({draws.randrange(num_layers)})
        if 0 < len(attention) + len(mlp) < 2 * num_layers:
            return Skip(frozenset(attention), frozenset(mlp))


def _drawn(draws: random.Random, num_layers: int) -> Skip:
    attention, mlp = ({layer for layer in range(num_layers) if draws.random() < 0.3} for _ in range(2))
    return Skip(frozenset(attention), frozenset(mlp))


def tune_layer_skip(target_dir: Path, data: list[Path] | None, output: Path, num_trials: int, seed: int = 0) -> Rating:
    """Write the best choice for the target in `target_dir` to the file `output` and return its rating.

    Raises: BadRequestError when there is too little text, ModelUnsupportedError when its layers cannot be left out.
    """
    model = load_model(target_dir, torch.float32)
    check_layers(model)
    tokenizer = load_tokenizer(target_dir)
    documents = read_documents(data) if data else training_code()
    random.Random(seed).shuffle(documents)
    prompts: list[list[int]] = []
    for document in documents:
        token_ids = tokenizer.encode(document)[:PROMPT_TOKENS]
        if len(token_ids) == PROMPT_TOKENS and len(prompts) < MAX_TEXTS:
            prompts.append(token_ids)
    if not prompts:
        raise BadRequestError(f"no text of {PROMPT_TOKENS} tokens to draft after", "data")
    own = OwnText(model, prompts)
    costs = own.costs()
    skip, rating = search(lambda one: rate(own.survival(one), one, costs), own.num_layers, num_trials, seed)
    measured = {
        "gain": round(rating.gain, 3), "gamma": rating.gamma, "draft_cost": round(rating.draft_cost, 3),
        "survival": [round(share, 3) for share in rating.survival], "texts": len(prompts), "trials": num_trials,
        "seed": seed,
    }  # fmt: skip
    found = {"attention": sorted(skip.attention), "mlp": sorted(skip.mlp), "measured": measured}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(found, indent=1) + "\n")
    return rating
