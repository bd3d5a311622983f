"""The rectangle that a GPU attends to is the sequences one after the other, for any lengths and window."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.service.attention import PackedLayout, Sequence, paged_attention
from specserve.service.trees import paths


class Layer(torch.nn.Module):
    layer_idx = 0


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), min_size=1, max_size=5),
    window=st.sampled_from([None, 1, 7]),
)
def test_padded_attention_is_attention_of_each_sequence_chain_or_tree(
    shapes: list[tuple[int, int]], window: int | None
) -> None:
    torch.manual_seed(len(shapes))
    total = sum(rows for rows, _ in shapes)
    slots = torch.randperm(400)
    sequences, written, start = [], [], 0
    for place, (rows, before) in enumerate(shapes):
        own, slots = slots[: rows + before], slots[rows + before :]
        ways = paths([node // 2 for node in range(rows - 1)]) if place % 2 else None
        tree = None if ways is None else tuple(tuple(before + node for node in way) for way in ways)
        sequences.append(Sequence(start, start + rows, own, tree))
        written.append(own[before:])
        start += rows
    keys, values = torch.randn(2, 400, 2, 8, dtype=torch.float64)
    query = torch.randn(1, 4, total, 8, dtype=torch.float64)
    key, value = torch.randn(2, 1, 2, total, 8, dtype=torch.float64)
    outputs = []
    for padded in (False, True):
        layout = PackedLayout([keys.clone()], [values.clone()], torch.cat(written), tuple(sequences), padded)
        outputs.append(paged_attention(Layer(), query, key, value, None, layout=layout, sliding_window=window)[0])
    assert torch.allclose(outputs[0], outputs[1], atol=1e-12)
