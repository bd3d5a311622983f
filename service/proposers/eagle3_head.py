"""An EAGLE-3 head: one decoder layer that reads the target's hidden states and drafts. Source: arXiv 2503.01840.

One module serves training and drafting: how its rows attend to each other is handed in. Files are the flat format
(`midlayer.*`) and `speculators` packages (`layers.0.*`); their conventions differ: loading says which it took.
"""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from ..errors import ModelUnsupportedError

LOG = logging.getLogger(__name__)
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes queries [..., heads, dim], keys and values [..., kv_heads, dim] and returns [..., heads, dim]."""

NUM_TAPS = 3


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Shapes and conventions of one head.

    `taps` count as transformers' `hidden_states`: i enters decoder layer i. `norm_before_residual`: the residual is the
    normed hidden state. `recycle_normed`: a drafted row hands on its hidden state after the final norm.
    """

    hidden: int
    target_hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    draft_vocab: int
    vocab: int
    taps: tuple[int, ...]
    eps: float = 1e-6
    rope_theta: float = 10_000.0
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    norm_each_tap: bool = False
    recycle_normed: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    own_embedding: bool = False


class Attention(nn.Module):
    """Attention whose input is twice as wide as its output: the token's embedding beside the hidden state."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        width, dim, bias = 2 * config.hidden, config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(width, config.heads * dim, bias=bias)
        self.k_proj = nn.Linear(width, config.kv_heads * dim, bias=bias)
        self.v_proj = nn.Linear(width, config.kv_heads * dim, bias=bias)
        self.o_proj = nn.Linear(config.heads * dim, config.hidden, bias=bias)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(dim, eps=config.eps)
            self.k_norm = nn.RMSNorm(dim, eps=config.eps)
        self._config = config

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Return the attention output of rows `x` [..., 2 * hidden] at `positions` [...]."""
        config = self._config
        query = self.q_proj(x).unflatten(-1, (config.heads, config.head_dim))
        key = self.k_proj(x).unflatten(-1, (config.kv_heads, config.head_dim))
        value = self.v_proj(x).unflatten(-1, (config.kv_heads, config.head_dim))
        if config.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        cosines, sines = _angles(positions, config, x.dtype)
        query, key = _rotate(query, cosines, sines), _rotate(key, cosines, sines)
        mixed: torch.Tensor = self.o_proj(attend(query, key, value).flatten(-2))
        return mixed


class Mlp(nn.Module):
    """The gated feed-forward part of a Llama layer."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.down_proj = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the part's output for rows `x` [..., hidden]."""
        out: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class MidLayer(nn.Module):
    """The head's decoder layer; embedding and hidden state each have a norm of their own."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden, eps=config.eps)
        self.hidden_norm = nn.RMSNorm(config.hidden, eps=config.eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden, eps=config.eps)
        self.self_attn = Attention(config)
        self.mlp = Mlp(config)
        self._norm_before_residual = config.norm_before_residual

    def forward(
        self, hidden: torch.Tensor, embedded: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Return the next hidden states, [..., hidden]."""
        normed = self.hidden_norm(hidden)
        residual = normed if self._norm_before_residual else hidden
        x = torch.cat([self.input_layernorm(embedded), normed], -1)
        residual = residual + self.self_attn(x, positions, attend)
        out: torch.Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return out


class Eagle3Head(nn.Module):
    """Drafts from hidden states. Row i pairs the target's hidden states at position i with the token at i + 1."""

    d2t: torch.Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        width = len(config.taps) * config.target_hidden
        self.config = config
        self.fc = nn.Linear(width, config.hidden, bias=False)
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(width, eps=config.eps)
        if config.norm_each_tap:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(config.target_hidden, eps=config.eps) for _ in config.taps)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        self.midlayer = MidLayer(config)
        self.norm = nn.RMSNorm(config.hidden, eps=config.eps)
        self.lm_head = nn.Linear(config.hidden, config.draft_vocab, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab, dtype=torch.int64))

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        """Return the hidden states a first row starts from, given the target's [..., len(taps) * target_hidden]."""
        if self.config.norm_before_fc:
            taps = self.input_norm(taps)
        if self.config.norm_each_tap:
            parts = taps.chunk(len(self.config.taps), -1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        fused: torch.Tensor = self.fc(taps)
        return fused

    def forward(
        self, hidden: torch.Tensor, embedded: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits over the draft vocabulary and the hidden states that a next row goes on from."""
        out = self.midlayer(hidden, embedded, positions, attend)
        normed = self.norm(out)
        return self.lm_head(normed), normed if self.config.recycle_normed else out

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Return the target's token ids; the file holds each one's distance from the draft id."""
        return draft_ids + self.d2t[draft_ids]


def _angles(positions: torch.Tensor, config: Eagle3Config, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines [..., 1, head_dim] in `dtype`; angles are float32 or better."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    exponents = torch.arange(0, config.head_dim, 2, dtype=exact) / config.head_dim
    angles = positions[..., None].to(exact) * config.rope_theta**-exponents
    angles = torch.cat([angles, angles], -1).unsqueeze(-2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cosines + torch.cat([-second, first], -1) * sines


def load_eagle3(folder: Path, vocab: int, target_hidden: int, target_layers: int, dtype: torch.dtype) -> Eagle3Head:
    """Return the head in `folder`, made for a target of these shapes.

    Raises: ModelUnsupportedError that names missing and unexpected tensors, or says how the head does not fit.
    """
    stated = _read_config(folder)
    tensors = _read_tensors(folder)
    config = _config(stated, tensors, vocab, target_hidden, target_layers)
    _check_fit(config, stated, tensors, folder)
    head = Eagle3Head(config)
    tensors.pop("t2d", None)
    if config.draft_vocab == config.vocab:
        tensors.setdefault("d2t", torch.zeros(config.draft_vocab, dtype=torch.int64))
    expected = set(head.state_dict())
    missing, unexpected = sorted(expected - set(tensors)), sorted(set(tensors) - expected)
    if missing or unexpected:
        raise ModelUnsupportedError(f"{folder}: tensors missing: {_some(missing)}; unexpected: {_some(unexpected)}")
    for name, tensor in head.state_dict().items():
        if tensors[name].shape != tensor.shape:
            found, wanted = tuple(tensors[name].shape), tuple(tensor.shape)
            raise ModelUnsupportedError(f"{folder}: {name} is {found}; this target needs {wanted}")
    head.load_state_dict(tensors)
    ids = head.target_ids(torch.arange(config.draft_vocab))
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise ModelUnsupportedError(f"{folder}: d2t leads outside the target's {vocab} tokens")
    LOG.info(
        "EAGLE-3 head %s: taps before layers %s, norm_before_residual %s, norm_before_fc %s, fc_norm %s, recycles %s",
        folder, config.taps, config.norm_before_residual, config.norm_before_fc, config.norm_each_tap,
        "normed" if config.recycle_normed else "raw",
    )  # fmt: skip
    return head.to(dtype).eval().requires_grad_(False)


def save_eagle3(head: Eagle3Head, folder: Path, extra: dict[str, Any]) -> None:
    """Write `head` in the flat format, in bf16; `extra` goes into its configuration."""
    config = head.config
    state = {name: t if t.dtype == torch.int64 else t.to(torch.bfloat16) for name, t in head.state_dict().items()}
    known = torch.zeros(config.vocab, dtype=torch.bool)
    known[head.target_ids(torch.arange(config.draft_vocab))] = True
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: t.contiguous() for name, t in state.items()} | {"t2d": known}, folder / "model.safetensors")
    stated = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden,
        "target_hidden_size": config.target_hidden,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": 1,
        "vocab_size": config.vocab,
        "draft_vocab_size": config.draft_vocab,
        "rms_norm_eps": config.eps,
        "rope_theta": config.rope_theta,
        "hidden_act": "silu",
        "attention_bias": config.attention_bias,
        "norm_before_residual": config.norm_before_residual,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in config.taps],
            "use_aux_hidden_state": True,
        },
    }
    (folder / "config.json").write_text(json.dumps(stated | extra, indent=1) + "\n")


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        stated: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelUnsupportedError(f"cannot read {folder}/config.json: {error}") from error
    return stated


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors under the flat format's names. Only safetensors are read: the others can run code."""
    path = folder / "model.safetensors"
    if not path.exists():
        raise ModelUnsupportedError(f"{folder} has no model.safetensors (pickled weights are not read; convert them)")
    return {name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in load_file(path).items()}


def _config(
    stated: dict[str, Any], tensors: dict[str, torch.Tensor], vocab: int, target_hidden: int, target_layers: int
) -> Eagle3Config:
    packaged = "speculators_model_type" in stated
    layer: dict[str, Any] = stated.get("transformer_layer_config", stated)
    hidden, heads = int(layer["hidden_size"]), int(layer["num_attention_heads"])
    rope = layer.get("rope_parameters") or layer
    draft_vocab = stated.get("draft_vocab_size") or stated.get("truncated_vocab_size") or layer.get("vocab_size")
    return Eagle3Config(
        hidden=hidden,
        target_hidden=int(stated.get("target_hidden_size") or target_hidden),
        heads=heads,
        kv_heads=int(layer.get("num_key_value_heads") or heads),
        head_dim=int(layer.get("head_dim") or hidden // heads),
        intermediate=int(layer["intermediate_size"]),
        draft_vocab=int(draft_vocab or vocab),
        vocab=vocab,
        taps=taps(stated, target_layers, packaged),
        eps=float(layer.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta") or 10_000.0),
        norm_before_residual=bool(stated.get("norm_before_residual", False)),
        norm_before_fc=bool(stated.get("norm_before_fc", False)) or "input_norm.weight" in tensors,
        norm_each_tap=bool(stated.get("fc_norm", False)) or "fc_norm.0.weight" in tensors,
        recycle_normed=packaged and bool(stated.get("norm_output", False)),
        qk_norm="midlayer.self_attn.q_norm.weight" in tensors,
        attention_bias=bool(layer.get("attention_bias", False)),
        own_embedding="embed_tokens.weight" in tensors,
    )


def taps(stated: dict[str, Any], target_layers: int, packaged: bool) -> tuple[int, ...]:
    """Return which of the target's hidden states a head reads, counted as transformers does.

    `speculators` packages name the layer that a state enters, flat files (SpecForge, SGLang) the one it leaves.
    """
    ids = stated.get("eagle_aux_hidden_state_layer_ids")
    ids = ids or (stated.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if not ids:
        return 2, target_layers // 2, target_layers - 3
    return tuple(int(layer) if packaged else int(layer) + 1 for layer in ids)


def _check_fit(config: Eagle3Config, stated: dict[str, Any], tensors: dict[str, torch.Tensor], folder: Path) -> None:
    layer = stated.get("transformer_layer_config", stated)
    declared = layer.get("vocab_size")
    if declared is not None and declared != config.vocab:
        raise ModelUnsupportedError(f"{folder} was made for {declared} tokens; this target has {config.vocab}")
    if config.draft_vocab != config.vocab and "d2t" not in tensors:
        raise ModelUnsupportedError(f"{folder}: a draft vocabulary of {config.draft_vocab} tokens needs the tensor d2t")
    if int(layer.get("num_hidden_layers", 1)) != 1:
        raise ModelUnsupportedError(f"{folder}: EAGLE-3 heads of more than one layer are not supported")


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "none"
