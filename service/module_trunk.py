"""A trunk run through transformers' own modules, with attention over paged keys and values: any family, any device."""

import copy
from collections.abc import Sequence as Rows
from typing import Any

import torch
from torch import nn

from .attention import PackedLayout, Sequence
from .messages import ScoreRow
from .models import LoadedModel
from .skipping import NOTHING, Skip
from .slots import moved_slots


class ModuleTrunk:
    """Owns the KV slots: keys and values [slots, kv_heads, head_dim] a layer, on the model's device."""

    def __init__(self, model: LoadedModel, num_pages: int, page_tokens: int) -> None:
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        shape = (num_pages * page_tokens, kv_heads, head_dim)
        self._trunk = model.trunk
        self._shortened: dict[Skip, nn.Module] = {NOTHING: model.trunk}
        self._device = next(model.trunk.parameters()).device
        self._page_tokens = page_tokens
        layers = range(config.num_hidden_layers)
        self._keys = [torch.zeros(shape, dtype=model.dtype, device=self._device) for _ in layers]
        self._values = [torch.zeros(shape, dtype=model.dtype, device=self._device) for _ in layers]

    def forward(
        self, rows: Rows[ScoreRow], layers: Rows[int] = (), skip: Skip = NOTHING
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return what `FusedTrunk.forward` returns."""
        token_ids: list[int] = []
        positions: list[int] = []
        sequences, write_slots = [], []
        for row in rows:
            start, count = len(token_ids), len(row.token_ids)
            token_ids.extend(row.token_ids)
            ways = row.ways
            offsets = range(count) if ways is None else [len(way) - 1 for way in ways]
            positions.extend(row.start_position + offset for offset in offsets)
            slots = self._slots(row.block_table, row.start_position + count)
            write_slots.append(slots[row.start_position :])
            sequences.append(Sequence(start, start + count, slots, ways))
        on_gpu = self._device.type != "cpu"
        layout = PackedLayout(self._keys, self._values, torch.cat(write_slots), tuple(sequences), padded=on_gpu)
        if skip not in self._shortened:
            self._shortened[skip] = shortened(self._trunk, skip)
        output = self._shortened[skip](
            input_ids=torch.tensor([token_ids], device=self._device),
            position_ids=torch.tensor([positions], device=self._device),
            use_cache=False,
            output_hidden_states=bool(layers),
            layout=layout,
        )
        features = tuple(output.hidden_states[layer][0] for layer in layers)
        return output.last_hidden_state[0], features

    def move(self, rows: Rows[ScoreRow]) -> None:
        """Do what `FusedTrunk.move` does."""
        sources, targets = (torch.from_numpy(slots).to(self._device) for slots in moved_slots(rows, self._page_tokens))
        for layer in (*self._keys, *self._values):
            layer[targets] = layer[sources]

    def _slots(self, block_table: Rows[int], num_tokens: int) -> torch.Tensor:
        pages = torch.tensor(block_table, dtype=torch.int64).unsqueeze(1) * self._page_tokens
        return (pages + torch.arange(self._page_tokens)).flatten()[:num_tokens].to(self._device)


def shortened(trunk: nn.Module, skip: Skip) -> nn.Module:
    """Return `trunk` without what `skip` names, on the same weights; layers keep their numbers, and so their KV."""
    short = _shallow(trunk)
    short.layers = nn.ModuleList(_without(layer, index, skip) for index, layer in enumerate(trunk.layers))  # type: ignore[arg-type]  # ModuleList
    return short


def _without(layer: Any, index: int, skip: Skip) -> nn.Module:
    no_attention, no_mlp = index in skip.attention, index in skip.mlp
    if no_attention and no_mlp:
        return _Passed()
    short = _shallow(layer)
    if no_attention:
        short.self_attn = _NoAttention()
    if no_mlp:
        short.mlp = _NoMlp()
    return short


def _shallow(module: nn.Module) -> nn.Module:
    """Return a copy whose children can be replaced without touching `module`."""
    made: nn.Module = copy.copy(module)
    made._modules = dict(module._modules)
    return made


class _Passed(nn.Module):
    """A layer that leaves the hidden states as they are."""

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states


class _NoAttention(nn.Module):
    """Attention that adds nothing; no family's norm makes something of zeros."""

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        return torch.zeros_like(hidden_states), None


class _NoMlp(nn.Module):
    """An MLP that adds nothing."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(hidden_states)
