"""Which sub-layers a forward leaves out when a model drafts for itself: the residual stream passes them by.

Sources: Draft & Verify, arXiv 2309.08168 (attention and MLP chosen each for itself); LayerSkip, arXiv 2404.16710 (all
layers from one on).
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ModelUnsupportedError


@dataclass(frozen=True, slots=True)
class Skip:
    """The layers, counted from 0, whose attention or MLP is left out."""

    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()

    def checked(self, num_layers: int) -> "Skip":
        """Return this choice if a model of `num_layers` layers can make it and something is left out, and something in.

        Raises: ModelUnsupportedError.
        """
        named = self.attention | self.mlp
        if not named:
            raise ModelUnsupportedError("no layer is skipped: the draft would be the target")
        if min(named) < 0 or max(named) >= num_layers:
            raise ModelUnsupportedError(f"layer {max(named)} is skipped; this target has layers 0 to {num_layers - 1}")
        if len(self.attention) == len(self.mlp) == num_layers:
            raise ModelUnsupportedError(f"all {num_layers} layers are skipped")
        return self


NOTHING = Skip()


def whole_layers(layers: Iterable[int]) -> Skip:
    """Return the choice that leaves out both parts of `layers`."""
    both = frozenset(layers)
    return Skip(both, both)


def layers_from(exit_layer: int, num_layers: int) -> Skip:
    """Return the choice that leaves after `exit_layer` layers. Raises: ModelUnsupportedError when there is no such."""
    if not 1 <= exit_layer < num_layers:
        raise ModelUnsupportedError(
            f"early_exit is {exit_layer}; this target of {num_layers} layers can leave after 1 to {num_layers - 1}"
        )
    return whole_layers(range(exit_layer, num_layers))


def read_skip(path: Path) -> Skip:
    """Return the choice in a JSON file: `{"attention": [...], "mlp": [...]}`, bare or under one model's name.

    Raises: ModelUnsupportedError when it holds none.
    """
    try:
        stated: Any = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelUnsupportedError(f"cannot read skipped layers from {path}: {error}") from error
    if isinstance(stated, dict) and "attention" not in stated and len(stated) == 1:
        (stated,) = stated.values()
    parts = [stated.get(name) for name in ("attention", "mlp")] if isinstance(stated, dict) else [None]
    if not all(isinstance(part, list) and all(type(layer) is int for layer in part) for part in parts):
        raise ModelUnsupportedError(f'{path} holds no {{"attention": [layers], "mlp": [layers]}}')
    attention, mlp = (frozenset(part or ()) for part in parts)
    return Skip(attention, mlp)
