"""A decoder's layers as four matrix products and four kernels each, for the families whose layers have that form.

The weights come from transformers' own modules, whose forward remains the truth: `fused_trunk` returns a trunk only
after it agreed with the modules on a few tokens.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from .errors import ModelUnsupportedError
from .kernels.native import BLOCK_SLOTS, DTYPES, library, pointer
from .messages import ScoreRow
from .packed_linear import Linear, LinearKind, PackedLinear
from .skipping import NOTHING, Skip
from .slots import PlacedRow, moved_slots, slots_at

LOG = logging.getLogger(__name__)
Numbers = npt.NDArray[np.int64]

ROUND_THEN_SCALE, ONE_PLUS, SCALE_THEN_ROUND = 0, 1, 2
NORM_MODES = {
    "llama": ROUND_THEN_SCALE,
    "mistral": ROUND_THEN_SCALE,
    "qwen2": ROUND_THEN_SCALE,
    "qwen3": ROUND_THEN_SCALE,
    "phi3": ROUND_THEN_SCALE,
    "gemma2": ONE_PLUS,
    "gemma3_text": ONE_PLUS,
    "olmo2": SCALE_THEN_ROUND,
}
"""Families whose layers are known to have the fused form, with where their norm rounds."""

ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1}
STEADY_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles depend on the position alone."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer; a norm that the family lacks is None."""

    qkv: Linear
    output: Linear
    gate_up: Linear
    down: Linear
    pre_attention: torch.Tensor | None
    post_attention: torch.Tensor | None
    pre_mlp: torch.Tensor | None
    post_mlp: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    cosines: torch.Tensor
    sines: torch.Tensor
    scaling: float
    window: int
    softcap: float


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers that all layers share."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    rotary: int
    eps: float
    norm_mode: int
    norm_whole: int
    activation: int


class FusedTrunk:
    """Runs packed rows through the layers. Owns the KV blocks: keys [blocks, kv_heads, dim, 16], values
    [blocks, kv_heads, 16, dim]; a page is a whole number of blocks."""

    def __init__(
        self, embed: nn.Module, layers: Sequence[Layer], norm: torch.Tensor, sizes: Sizes, num_pages: int, page: int
    ) -> None:
        assert page % BLOCK_SLOTS == 0
        native = library()
        assert native is not None
        self._native = native
        self._embed = embed
        self._layers = tuple(layers)
        self._norm = norm
        self._sizes = sizes
        self._page_tokens = page
        self._dtype = DTYPES[norm.dtype]
        blocks = num_pages * page // BLOCK_SLOTS
        shape = (blocks, sizes.kv_heads, sizes.head_dim * BLOCK_SLOTS)
        self._keys = [torch.zeros(shape, dtype=norm.dtype) for _ in layers]
        self._values = [torch.zeros(shape, dtype=norm.dtype) for _ in layers]

    def forward(
        self, rows: Sequence[ScoreRow], layers: Sequence[int] = (), skip: Skip = NOTHING
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return the hidden states after the final norm of every token of `rows`, and those of `layers`.

        Shapes: [total, hidden] each. Layer i is what enters decoder layer i, the last one what leaves the final norm.
        What is left out by `skip` writes no KV rows. Not both `layers` and `skip`.
        """
        batch = _Packed(rows, self._page_tokens)
        x = self._embed(torch.from_numpy(batch.token_ids))
        x = x.clone() if x._base is not None else x
        branch: torch.Tensor | None = None
        post: torch.Tensor | None = None
        seen: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self._layers):
            if index not in skip.attention:
                normed = self._add_norm(x, branch, post, layer.pre_attention)
                if index in layers:
                    seen[index] = x.clone()
                branch = layer.output(self._attention(index, layer, layer.qkv(normed), batch))
                post = layer.post_attention
            if index not in skip.mlp:
                normed = self._add_norm(x, branch, post, layer.pre_mlp)
                branch, post = layer.down(self._gated(layer.gate_up(normed))), layer.post_mlp
        hidden = self._add_norm(x, branch, post, self._norm)
        seen[len(self._layers)] = hidden
        return hidden, tuple(seen[layer] for layer in layers)

    def move(self, rows: Sequence[ScoreRow]) -> None:
        """Move the KV rows that earlier trees left elsewhere (`ScoreRow.moved_from`) to their positions' slots."""
        sources, targets = moved_slots(rows, self._page_tokens)
        for keys, values in zip(self._keys, self._values, strict=True):
            self._native.specserve_move_slots(
                self._dtype, keys.data_ptr(), values.data_ptr(), sources.ctypes.data, targets.ctypes.data, len(sources),
                self._sizes.kv_heads, self._sizes.head_dim,
            )  # fmt: skip

    def run(self, residual: torch.Tensor, x: torch.Tensor, rows: Sequence[PlacedRow]) -> torch.Tensor:
        """Return what the only layer makes of `x`, the attention's input, beside `residual`: [total, hidden]."""
        (layer,) = self._layers
        residual = residual.clone()
        branch = layer.output(self._attention(0, layer, layer.qkv(x), _Packed(rows, self._page_tokens)))
        normed = self._add_norm(residual, branch, layer.post_attention, layer.pre_mlp)
        return residual.add_(layer.down(self._gated(layer.gate_up(normed))))

    def _add_norm(
        self, x: torch.Tensor, branch: torch.Tensor | None, post: torch.Tensor | None, pre: torch.Tensor | None
    ) -> torch.Tensor:
        """Add `post`-normed `branch` to `x` in place and return `x` normed by `pre` (`x` itself without one)."""
        out = x if pre is None else torch.empty_like(x)
        sizes = self._sizes
        self._native.specserve_add_norm(
            self._dtype, x.data_ptr(), pointer(branch), pointer(post), pointer(pre), out.data_ptr(),
            x.shape[0], sizes.hidden, sizes.eps, sizes.norm_mode,
        )  # fmt: skip
        return out

    def _attention(self, index: int, layer: Layer, qkv: torch.Tensor, batch: "_Packed") -> torch.Tensor:
        sizes = self._sizes
        rows = qkv.shape[0]
        q = qkv.new_empty(rows, sizes.heads * sizes.head_dim)
        keys, values = self._keys[index].data_ptr(), self._values[index].data_ptr()
        self._native.specserve_rope_write(
            self._dtype, qkv.data_ptr(), pointer(layer.q_norm), pointer(layer.k_norm), layer.cosines.data_ptr(),
            layer.sines.data_ptr(), batch.positions_at, batch.slots_at, q.data_ptr(), keys, values, rows, sizes.heads,
            sizes.kv_heads, sizes.head_dim, sizes.rotary, sizes.eps, sizes.norm_mode, sizes.norm_whole,
        )  # fmt: skip
        out = torch.empty_like(q)
        self._native.specserve_attend(
            self._dtype, q.data_ptr(), keys, values, out.data_ptr(), batch.blocks_at, batch.block_starts_at,
            batch.row_starts_at, batch.first_positions_at, batch.path_starts_at, batch.path_slots_at,
            batch.num_sequences, sizes.heads, sizes.kv_heads, sizes.head_dim, layer.window, layer.scaling,
            layer.softcap,
        )  # fmt: skip
        return out

    def _gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        sizes = self._sizes
        out = gate_up.new_empty(gate_up.shape[0], sizes.intermediate)
        self._native.specserve_gated(
            self._dtype, gate_up.data_ptr(), out.data_ptr(), out.shape[0], sizes.intermediate, sizes.activation
        )
        return out


class _Packed:
    """A batch as the kernels read it: flat int64 arrays, kept alive here while their addresses are in use."""

    def __init__(self, rows: Sequence[PlacedRow], page_tokens: int) -> None:
        counts = [len(row.token_ids) for row in rows]
        starts = [row.start_position for row in rows]
        self.num_sequences = len(rows)
        self.token_ids = np.fromiter((token for row in rows for token in row.token_ids), np.int64, sum(counts))
        row_starts = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(counts, out=row_starts[1:])
        first = np.array(starts, np.int64)
        positions = np.arange(len(self.token_ids)) - np.repeat(row_starts[:-1] - first, counts)
        per_page = page_tokens // BLOCK_SLOTS
        tables = [np.array(row.block_table, np.int64) for row in rows]
        pages = np.concatenate(tables)
        blocks = pages if per_page == 1 else (pages[:, None] * per_page + np.arange(per_page)).ravel()
        block_starts = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(table) * per_page for table in tables], out=block_starts[1:])
        place = positions // BLOCK_SLOTS + np.repeat(block_starts[:-1], counts)
        slots = blocks[place] * BLOCK_SLOTS + positions % BLOCK_SLOTS
        path_starts, path_slots = _paths(rows, row_starts, positions, slots, page_tokens)
        self._alive = (positions, slots, blocks, block_starts, row_starts, first, path_starts, path_slots)
        (
            self.positions_at,
            self.slots_at,
            self.blocks_at,
            self.block_starts_at,
            self.row_starts_at,
            self.first_positions_at,
            self.path_starts_at,
            self.path_slots_at,
        ) = (None if array is None else array.ctypes.data for array in self._alive)


def _paths(
    rows: Sequence[PlacedRow], row_starts: Numbers, positions: Numbers, slots: Numbers, page_tokens: int
) -> tuple[Numbers | None, Numbers | None]:
    """Return where each packed row's path begins, and the slots of all paths; None and None where nothing is a tree.

    Sets `positions` and `slots` of a tree's rows by the ways to them. A row that is in no tree has an empty path.
    """
    ways_of = [row.ways for row in rows]
    if all(ways is None for ways in ways_of):
        return None, None
    lengths = np.zeros(len(positions) + 1, np.int64)
    found: list[Numbers] = []
    for row, ways, start in zip(rows, ways_of, row_starts[:-1].tolist(), strict=True):
        if ways is None:
            continue
        end, own = start + len(ways), np.array([len(way) for way in ways], np.int64)
        on_ways = slots_at(row.block_table, [place for way in ways for place in way], page_tokens)
        positions[start:end] = row.start_position + own - 1
        slots[start:end] = on_ways[np.cumsum(own) - 1]
        lengths[start + 1 : end + 1] = own
        found.append(on_ways)
    return np.cumsum(lengths), np.concatenate(found)


def fused_trunk(
    trunk: Any, config: Any, dtype: torch.dtype, max_positions: int, num_pages: int, page_tokens: int,
    linear: LinearKind = PackedLinear,
) -> FusedTrunk | None:  # fmt: skip
    """Return the fused form of `trunk`, or None where there is none; the caller then runs the modules.

    Raises: ModelUnsupportedError where there is none and `linear` rounds weights, which the modules do not.
    """
    reason = _unsuitable(trunk, config, dtype, page_tokens)
    if reason is not None and linear is not PackedLinear:
        raise ModelUnsupportedError(f"there are no int8 weights for this model here: {reason}")
    if reason is not None:
        LOG.info("the modules' own forward is used: %s", reason)
        return None
    sizes = _sizes(trunk, config)
    layers = [_layer(trunk, layer, config, dtype, max_positions, linear) for layer in trunk.layers]
    return FusedTrunk(trunk.embed_tokens, layers, trunk.norm.weight.detach(), sizes, num_pages, page_tokens)


def _unsuitable(trunk: Any, config: Any, dtype: torch.dtype, page_tokens: int) -> str | None:
    """Return why the fused form does not hold, or None."""
    if config.model_type not in NORM_MODES:
        return f"layers of {config.model_type} have another form"
    if dtype not in DTYPES or next(trunk.parameters()).device.type != "cpu":
        return f"there are no kernels for {dtype} there"
    if getattr(config, "use_bidirectional_attention", False):
        return "attention is not causal"
    if (config.hidden_act if hasattr(config, "hidden_act") else config.hidden_activation) not in ACTIVATIONS:
        return "the activation is not known"
    parameters = config.rope_parameters
    ropes = parameters.values() if not isinstance(parameters.get("rope_type"), str) else [parameters]
    if any(rope["rope_type"] not in STEADY_ROPE for rope in ropes if rope is not None):
        return "its rotary angles depend on the length"
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim % BLOCK_SLOTS or config.intermediate_size % BLOCK_SLOTS or page_tokens % BLOCK_SLOTS:
        return f"head size, MLP size and page must be multiples of {BLOCK_SLOTS}"
    return None if library() is not None else "the kernels could not be built"


def _sizes(trunk: Any, config: Any) -> Sizes:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    first = trunk.layers[0].self_attn
    q_norm = _weight(first, "q_norm")
    activation = config.hidden_act if hasattr(config, "hidden_act") else config.hidden_activation
    return Sizes(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        rotary=_angles(trunk, first, config, 1)[0].shape[-1],
        eps=float(config.rms_norm_eps),
        norm_mode=NORM_MODES[config.model_type],
        norm_whole=int(q_norm is not None and q_norm.shape[0] != head_dim),
        activation=ACTIVATIONS[activation],
    )


def _weight(module: Any, name: str) -> torch.Tensor | None:
    found = getattr(module, name, None)
    return None if found is None else found.weight.detach()


def _merged(linear: LinearKind, *modules: nn.Linear) -> Linear:
    weight = torch.cat([module.weight.detach() for module in modules])
    biases = [module.bias for module in modules]
    bias = None if biases[0] is None else torch.cat([one.detach() for one in biases])
    return linear(weight, bias)


def _layer(trunk: Any, layer: Any, config: Any, dtype: torch.dtype, max_positions: int, linear: LinearKind) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    merged = partial(_merged, linear)
    fused = hasattr(attention, "qkv_proj")
    sandwich = hasattr(layer, "pre_feedforward_layernorm")
    after = not hasattr(layer, "input_layernorm")
    cosines, sines = _angles(trunk, attention, config, max_positions)
    table_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    window = getattr(attention, "sliding_window", getattr(config, "sliding_window", None))
    return Layer(
        qkv=merged(attention.qkv_proj) if fused else merged(attention.q_proj, attention.k_proj, attention.v_proj),
        output=merged(attention.o_proj),
        gate_up=merged(mlp.gate_up_proj) if hasattr(mlp, "gate_up_proj") else merged(mlp.gate_proj, mlp.up_proj),
        down=merged(mlp.down_proj),
        pre_attention=_weight(layer, "input_layernorm"),
        post_attention=_weight(layer, "post_attention_layernorm") if sandwich or after else None,
        pre_mlp=_weight(layer, "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm")
        if not after
        else None,
        post_mlp=_weight(layer, "post_feedforward_layernorm"),
        q_norm=_weight(attention, "q_norm"),
        k_norm=_weight(attention, "k_norm"),
        cosines=cosines.to(table_dtype).contiguous(),
        sines=sines.to(table_dtype).contiguous(),
        scaling=float(attention.scaling),
        window=int(window or 0),
        softcap=float(getattr(attention, "attn_logit_softcapping", None) or 0.0),
    )


@torch.inference_mode()
def _angles(trunk: Any, attention: Any, config: Any, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines [count, rotary] float32 of the layer's own rotary embedding."""
    like = torch.zeros(1, dtype=torch.float32)
    positions = torch.arange(count).unsqueeze(0)
    if config.model_type == "gemma3_text":
        cosines, sines = trunk.rotary_emb(like, positions, attention.layer_type)
    else:
        cosines, sines = trunk.rotary_emb(like, positions)
    return cosines[0], sines[0]
