"""A trunk with its KV pages: packed forwards of many requests, prefill and decode alike."""

from collections.abc import Sequence as Rows

import torch

from .attention import PackedLayout, Sequence
from .messages import ScoreRow
from .models import LoadedModel


class PagedModel:
    """Runs a model's trunk over packed rows. Owns KV pages; who holds which page is the caller's business."""

    def __init__(self, model: LoadedModel, num_pages: int, page_tokens: int) -> None:
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        shape = (num_pages * page_tokens, kv_heads, head_dim)
        self._trunk = model.trunk
        self._page_tokens = page_tokens
        self._keys = [torch.zeros(shape, dtype=model.dtype) for _ in range(config.num_hidden_layers)]
        self._values = [torch.zeros(shape, dtype=model.dtype) for _ in range(config.num_hidden_layers)]

    @torch.inference_mode()
    def forward(self, rows: Rows[ScoreRow]) -> torch.Tensor:
        """Return the final hidden states of each row's last `num_sampled` positions, packed: [sampled, hidden]."""
        token_ids: list[int] = []
        positions: list[int] = []
        sampled: list[int] = []
        sequences, write_slots = [], []
        for row in rows:
            start, count = len(token_ids), len(row.token_ids)
            token_ids.extend(row.token_ids)
            positions.extend(range(row.start_position, row.start_position + count))
            slots = self._slots(row.block_table, row.start_position + count)
            write_slots.append(slots[row.start_position :])
            sequences.append(Sequence(start, start + count, slots))
            sampled.extend(range(start + count - row.num_sampled, start + count))
        layout = PackedLayout(self._keys, self._values, torch.cat(write_slots), tuple(sequences))
        output = self._trunk(
            input_ids=torch.tensor([token_ids]), position_ids=torch.tensor([positions]), use_cache=False, layout=layout
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden if len(sampled) == len(token_ids) else hidden[torch.tensor(sampled, dtype=torch.int64)]

    def _slots(self, block_table: Rows[int], num_tokens: int) -> torch.Tensor:
        pages = torch.tensor(block_table, dtype=torch.int64).unsqueeze(1) * self._page_tokens
        return (pages + torch.arange(self._page_tokens)).flatten()[:num_tokens]
