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

    Shapes: `slots` [context] int64, in order of position; the last `end - start` of them are the query rows' own.
    """

    start: int
    end: int
    slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Where a packed batch reads and writes. `keys[layer]`, `values[layer]`: [slots, kv_heads, head_dim]."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    write_slots: torch.Tensor
    sequences: tuple[Sequence, ...]
    masks: dict[tuple[int, int | None, int], torch.Tensor | None] = field(default_factory=dict)


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
        if rows == 1 and (window is None or context <= window):
            layout.masks[key] = None
        else:
            query_positions = torch.arange(context - rows, context).unsqueeze(1)
            key_positions = torch.arange(context).unsqueeze(0)
            allowed = key_positions <= query_positions
            if window is not None:
                allowed &= key_positions > query_positions - window
            layout.masks[key] = allowed.repeat(group, 1).to(sequence.slots.device)
    return layout.masks[key]
