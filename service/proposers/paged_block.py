"""A head's layer over paged keys and values, and a head's modules as the processor likes them when it drafts."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from ..attention import PackedLayout, paged_attention
from ..attention import Sequence as Packed
from ..fused_trunk import ROUND_THEN_SCALE, FusedTrunk, Layer, Sizes
from ..kernels.native import BLOCK_SLOTS, DTYPES, library
from ..packed_linear import PackedLinear
from ..slots import slots_at
from .head_block import HeadBlock, angles

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BlockRow:
    """Tokens whose rows the layer computes, from `start_position` on, or at the ends of `ways` (`PlacedRow`)."""

    start_position: int
    token_ids: tuple[int, ...]
    block_table: tuple[int, ...]
    ways: tuple[tuple[int, ...], ...] | None = None


class PagedBlock(Protocol):
    """Owns the layer's keys and values, in pages numbered as the target's."""

    def run(self, residual: torch.Tensor, x: torch.Tensor, rows: Sequence[BlockRow]) -> torch.Tensor:
        """Return the layer's output [total, hidden] for the packed inputs of `rows`, which see all rows before them, or
        those on their ways."""
        ...


class ModuleBlock:
    """The layer's own forward, on any device, for every shape."""

    def __init__(self, block: HeadBlock, num_pages: int, page_tokens: int) -> None:
        like = block.self_attn.k_proj.weight
        shape = (num_pages * page_tokens, block.shape.kv_heads, block.shape.head_dim)
        self._block = block
        self._page_tokens = page_tokens
        self._keys = [torch.zeros(shape, dtype=like.dtype, device=like.device)]
        self._values = [torch.zeros(shape, dtype=like.dtype, device=like.device)]
        self._only_layer = nn.Module()
        self._only_layer.layer_idx = 0  # type: ignore[assignment]  # what `paged_attention` asks a layer for

    def run(self, residual: torch.Tensor, x: torch.Tensor, rows: Sequence[BlockRow]) -> torch.Tensor:
        """Return the layer's output."""
        device = x.device
        packed: list[Packed] = []
        written: list[torch.Tensor] = []
        positions: list[int] = []
        start = 0
        for row in rows:
            count, first = len(row.token_ids), row.start_position
            own = list(range(first, first + count)) if row.ways is None else [way[-1] for way in row.ways]
            end = 1 + (own[-1] if row.ways is None else max(map(max, row.ways)))
            slots = torch.from_numpy(slots_at(row.block_table, range(end), self._page_tokens)).to(device)
            packed.append(Packed(start, start + count, slots, row.ways))
            written.append(slots[own])
            positions.extend(own if row.ways is None else [first + len(way) - 1 for way in row.ways])
            start += count
        layout = PackedLayout(self._keys, self._values, torch.cat(written), tuple(packed), padded=device.type != "cpu")

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
            return paged_attention(self._only_layer, q, k, v, None, layout=layout)[0][0]

        out: torch.Tensor = self._block(residual, x, torch.tensor(positions, device=device), attend)
        return out


def paged_block(block: HeadBlock, num_pages: int, page_tokens: int, max_positions: int) -> PagedBlock:
    """Return the layer as four products and the kernels of `FusedTrunk` where they hold, else its own forward."""
    shape, weight = block.shape, block.self_attn.k_proj.weight
    fits = not (shape.head_dim % BLOCK_SLOTS or shape.intermediate % BLOCK_SLOTS or page_tokens % BLOCK_SLOTS)
    if shape.output_gate or not fits or weight.dtype not in DTYPES or weight.device.type != "cpu" or library() is None:
        LOG.info("a drafting head runs as its own modules: there are no kernels for it here")
        return ModuleBlock(block, num_pages, page_tokens)
    sizes = Sizes(
        heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim, hidden=shape.hidden,
        intermediate=shape.intermediate, rotary=shape.rotary, eps=shape.eps, norm_mode=ROUND_THEN_SCALE, norm_whole=0,
        activation=0,
    )  # fmt: skip
    layer = _layer(block, max_positions)
    assert layer.pre_mlp is not None
    return FusedTrunk(nn.Identity(), [layer], layer.pre_mlp, sizes, num_pages, page_tokens)


def _layer(block: HeadBlock, max_positions: int) -> Layer:
    attention, mlp, shape = block.self_attn, block.mlp, block.shape
    weight = attention.k_proj.weight
    exact = torch.float64 if weight.dtype == torch.float64 else torch.float32
    cosines, sines = (part.squeeze(1).contiguous() for part in angles(torch.arange(max_positions), shape, exact))
    return Layer(
        qkv=_merged(attention.q_proj, attention.k_proj, attention.v_proj),
        output=_merged(attention.o_proj),
        gate_up=_merged(mlp.gate_proj, mlp.up_proj),
        down=_merged(mlp.down_proj),
        pre_attention=None,
        post_attention=None,
        pre_mlp=block.post_attention_layernorm.weight.detach(),
        post_mlp=None,
        q_norm=attention.q_norm.weight.detach() if shape.qk_norm else None,
        k_norm=attention.k_norm.weight.detach() if shape.qk_norm else None,
        cosines=cosines,
        sines=sines,
        scaling=shape.head_dim**-0.5,
        window=0,
        softcap=0.0,
    )


def _merged(*modules: nn.Linear) -> PackedLinear:
    biases = [module.bias.detach() for module in modules if module.bias is not None]
    return PackedLinear(
        torch.cat([module.weight.detach() for module in modules]), torch.cat(biases) if biases else None
    )


def packed(module: nn.Module) -> None:
    """Give the linear maps and norms below `module` their quick form, for inference alone; a `HeadBlock` stays."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            bias = None if child.bias is None else child.bias.detach()
            setattr(module, name, _Packed(PackedLinear(child.weight.detach(), bias)))
        elif isinstance(child, nn.RMSNorm) and child.weight.dtype in DTYPES and child.weight.device.type == "cpu":
            setattr(module, name, _Norm(child))
        elif not isinstance(child, HeadBlock):
            packed(child)


class _Packed(nn.Module):
    def __init__(self, product: PackedLinear) -> None:
        super().__init__()
        self._product = product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x)


class _Norm(nn.Module):
    """One kernel where torch runs five."""

    def __init__(self, norm: nn.RMSNorm) -> None:
        super().__init__()
        self._weight = norm.weight.detach()
        self._eps = float(norm.eps or 0.0)
        self._native = library()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._native is None:
            return nn.functional.rms_norm(x, self._weight.shape, self._weight, self._eps)
        x = x.contiguous()
        out = torch.empty_like(x)
        self._native.specserve_add_norm(
            DTYPES[x.dtype], x.data_ptr(), None, None, self._weight.data_ptr(), out.data_ptr(),
            x.numel() // x.shape[-1], x.shape[-1], self._eps, ROUND_THEN_SCALE,
        )  # fmt: skip
        return out
