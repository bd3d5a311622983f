"""Attention of packed sequences over paged keys and values, registered with transformers' attention interface.

Owns no state: the pages and the layout of the batch arrive as one keyword argument of the forward.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

ATTENTION_NAME = "specserve_paged"


@dataclass(frozen=True, slots=True)
class Sequence:
    """One request in a packed batch: its query rows `[start, end)` and the slots of its whole context.

    With `ways` the query rows are nodes of a tree: each sees what comes before the tree, and the places on its own way,
    its own last. Shapes: `slots` [context] int64, in order of place; without `ways` the last are the query rows' own.
    """

    start: int
    end: int
    slots: torch.Tensor
    ways: tuple[tuple[int, ...], ...] | None = None

    def allowed(self, window: int | None) -> torch.Tensor:
        """Return [rows, context], True where a row may look."""
        rows, context = self.end - self.start, len(self.slots)
        if self.ways is None:
            query_positions = torch.arange(context - rows, context).unsqueeze(1)
            seen = torch.arange(context) <= query_positions
            return seen if window is None else seen & (torch.arange(context) > query_positions - window)
        seen = torch.zeros(rows, context, dtype=torch.bool)
        for row, way in enumerate(self.ways):
            before = way[0]
            first = 0 if window is None else max(before + len(way) - window, 0)
            seen[row, first:before] = True
            seen[row, list(way[max(first - before, 0) :])] = True
        return seen


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Where a packed batch reads and writes. `keys[layer]`, `values[layer]`: [slots, kv_heads, head_dim].

    `padded`: attend to all sequences in one call, padded to the longest, as a GPU likes it; else one after the other.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    write_slots: torch.Tensor
    sequences: tuple[Sequence, ...]
    padded: bool = False
    masks: dict[tuple[int, int | None, int], torch.Tensor | None] = field(default_factory=dict)
    padding: dict[int | None, "Padding"] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Padding:
    """A packed batch as a rectangle. Shapes: `rows` [sequences, longest rows] into the packed rows, `slots`
    [sequences, longest context], `allowed` [sequences, 1, longest rows, longest context], `real` as `rows`, bool."""

    rows: torch.Tensor
    slots: torch.Tensor
    allowed: torch.Tensor
    real: torch.Tensor


def register_attention() -> None:
    """Make `specserve_paged` known to transformers; calling it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, lambda *args, **kwargs: None)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    layout: PackedLayout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention output `[1, total, heads, head_dim]` after writing the new keys and values to their slots.

    A group's query heads are folded into rows, so that grouped attention is one product per key head.
    """
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    keys, values = layout.keys[layer], layout.values[layer]
    keys.index_copy_(0, layout.write_slots, key[0].transpose(0, 1))
    values.index_copy_(0, layout.write_slots, value[0].transpose(0, 1))
    num_heads, total, head_dim = query.shape[1:]
    kv_heads = keys.shape[1]
    group = num_heads // kv_heads
    if layout.padded and softcap is None:
        return _padded_attention(layout, query, keys, values, scaling, sliding_window), None
    output = query.new_empty(total, num_heads, head_dim)
    for sequence in layout.sequences:
        rows = sequence.end - sequence.start
        folded = query[:, :, sequence.start : sequence.end].reshape(1, kv_heads, group * rows, head_dim)
        context_keys = keys.index_select(0, sequence.slots).transpose(0, 1).unsqueeze(0)
        context_values = values.index_select(0, sequence.slots).transpose(0, 1).unsqueeze(0)
        mask = _mask(layout, sequence, sliding_window, group)
        if softcap is None:
            attended = functional.scaled_dot_product_attention(
                folded, context_keys, context_values, attn_mask=mask, scale=scaling
            )
        else:
            scale = head_dim**-0.5 if scaling is None else scaling
            scores = softcap * torch.tanh(folded @ context_keys.transpose(-1, -2) * scale / softcap)
            scores = scores if mask is None else scores.masked_fill(~mask, float("-inf"))
            attended = scores.softmax(-1) @ context_values
        heads = attended.reshape(num_heads, rows, head_dim)
        output[sequence.start : sequence.end] = heads.transpose(0, 1)
    return output.unsqueeze(0), None


def _mask(layout: PackedLayout, sequence: Sequence, window: int | None, group: int) -> torch.Tensor | None:
    """Return `[group * rows, context]`, True where a row may look; None when every row may look everywhere."""
    key = (sequence.start, window, group)
    if key not in layout.masks:
        rows, context = sequence.end - sequence.start, len(sequence.slots)
        if rows == 1 and sequence.ways is None and (window is None or context <= window):
            layout.masks[key] = None
        else:
            layout.masks[key] = sequence.allowed(window).repeat(group, 1).to(sequence.slots.device)
    return layout.masks[key]


def _padded_attention(
    layout: PackedLayout,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    padding = layout.padding.get(window)
    if padding is None:
        padding = layout.padding[window] = padded(layout.sequences, window)
    rows = query[0].transpose(0, 1)[padding.rows].transpose(1, 2)
    attended = functional.scaled_dot_product_attention(
        rows,
        keys[padding.slots].transpose(1, 2),
        values[padding.slots].transpose(1, 2),
        attn_mask=padding.allowed,
        scale=scaling,
        enable_gqa=rows.shape[1] != keys.shape[1],
    )
    output = torch.empty_like(query[0].transpose(0, 1))
    output[padding.rows[padding.real]] = attended.transpose(1, 2)[padding.real]
    return output.unsqueeze(0)


def padded(sequences: tuple[Sequence, ...], window: int | None) -> Padding:
    """Return the rectangle that holds `sequences`; padding rows see slot 0 of their sequence alone."""
    device = sequences[0].slots.device
    num_rows = torch.tensor([sequence.end - sequence.start for sequence in sequences])
    contexts = torch.tensor([len(sequence.slots) for sequence in sequences])
    starts = torch.tensor([sequence.start for sequence in sequences])
    places = torch.arange(int(num_rows.max()))
    real = places < num_rows[:, None]
    rows = torch.where(real, starts[:, None] + places, starts[:, None])
    slots = torch.nn.utils.rnn.pad_sequence([sequence.slots for sequence in sequences], batch_first=True)
    positions = torch.where(real, (contexts - num_rows)[:, None] + places, 0)[..., None]
    columns = torch.arange(slots.shape[1])
    allowed = columns <= positions
    if window is not None:
        allowed &= columns > positions - window
    for place, sequence in enumerate(sequences):
        if sequence.ways is not None:
            own = sequence.allowed(window)
            allowed[place, : own.shape[0], : own.shape[1]] = own
    return Padding(rows.to(device), slots, allowed.unsqueeze(1).to(device), real.to(device))
