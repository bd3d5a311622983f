"""The decoder layer of a drafting head, whose input the head makes itself: attention, then the gated MLP.

One module serves training and drafting: how its rows attend to each other is handed in.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

LOG = logging.getLogger(__name__)
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes queries [..., heads, dim], keys and values [..., kv_heads, dim] and returns [..., heads, dim]."""


@dataclass(frozen=True, slots=True)
class BlockShape:
    """`width` is the attention's input; `rotary` of each head's dimensions are turned. `output_gate`: the query
    projection makes a second half that gates the attention's output."""

    width: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    rotary: int
    eps: float = 1e-6
    rope_theta: float = 10_000.0
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    output_gate: bool = False


def block_shape(layer: Mapping[str, Any], width_in_hiddens: int = 1, **changes: Any) -> BlockShape:
    """Return the shape that a Llama-like configuration states; `changes` win over it."""
    hidden, heads = int(layer["hidden_size"]), int(layer["num_attention_heads"])
    rope = layer.get("rope_parameters") or layer
    head_dim = int(layer.get("head_dim") or hidden // heads)
    scaling = layer.get("rope_scaling") or layer.get("rope_parameters") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind != "default":
        LOG.warning(
            "the head's %s rotary scaling is left out: its drafts far into a long text are less often right", kind
        )
    biased = bool(layer.get("attention_bias", False))
    stated: dict[str, Any] = {
        "width": width_in_hiddens * hidden,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": int(layer.get("num_key_value_heads") or heads),
        "head_dim": head_dim,
        "intermediate": int(layer["intermediate_size"]),
        "rotary": int(head_dim * float(rope.get("partial_rotary_factor") or layer.get("partial_rotary_factor") or 1)),
        "eps": float(layer.get("rms_norm_eps", 1e-6)),
        "rope_theta": float(rope.get("rope_theta") or 10_000.0),
        "qkv_bias": biased,
        "output_bias": biased,
    }
    return BlockShape(**(stated | changes))


class Attention(nn.Module):
    """Attention of rows that stand anywhere."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        queries = shape.heads * shape.head_dim * (2 if shape.output_gate else 1)
        self.q_proj = nn.Linear(shape.width, queries, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=shape.output_bias)
        if shape.qk_norm:
            self.q_norm = nn.RMSNorm(shape.head_dim, eps=shape.eps)
            self.k_norm = nn.RMSNorm(shape.head_dim, eps=shape.eps)
        self._shape = shape

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Return the attention output of rows `x` [..., width] at `positions` [...]."""
        shape = self._shape
        query = self.q_proj(x).unflatten(-1, (shape.heads, -1))
        gate = None
        if shape.output_gate:
            query, gate = query.chunk(2, -1)
        key = self.k_proj(x).unflatten(-1, (shape.kv_heads, shape.head_dim))
        value = self.v_proj(x).unflatten(-1, (shape.kv_heads, shape.head_dim))
        if shape.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        cosines, sines = angles(positions, shape, x.dtype)
        query, key = _rotate(query, cosines, sines), _rotate(key, cosines, sines)
        attended = attend(query, key, value)
        if gate is not None:
            attended = attended * gate.sigmoid()
        mixed: torch.Tensor = self.o_proj(attended.flatten(-2))
        return mixed


class Mlp(nn.Module):
    """The gated feed-forward part of a Llama layer."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the part's output for rows `x` [..., hidden]."""
        out: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class HeadBlock(nn.Module):
    """The layer; `input_norms` of its inputs have a norm of their own, which the head applies."""

    def __init__(self, shape: BlockShape, input_norms: int) -> None:
        super().__init__()
        if input_norms > 0:
            self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        if input_norms > 1:
            self.hidden_norm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.shape = shape

    def forward(self, residual: torch.Tensor, x: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Return the layer's output [..., hidden] for attention input `x` [..., width] beside `residual`."""
        residual = residual + self.self_attn(x, positions, attend)
        out: torch.Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return out


def angles(positions: torch.Tensor, shape: BlockShape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines [..., 1, rotary] in `dtype`; angles are float32 or better."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    exponents = torch.arange(0, shape.rotary, 2, dtype=exact, device=positions.device) / shape.rotary
    turned = positions[..., None].to(exact) * shape.rope_theta**-exponents
    turned = torch.cat([turned, turned], -1).unsqueeze(-2)
    return turned.cos().to(dtype), turned.sin().to(dtype)


def _rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    rotary = cosines.shape[-1]
    turned, kept = x[..., :rotary], x[..., rotary:]
    first, second = turned.chunk(2, -1)
    turned = turned * cosines + torch.cat([-second, first], -1) * sines
    return turned if rotary == x.shape[-1] else torch.cat([turned, kept], -1)
