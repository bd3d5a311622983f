"""An EAGLE-3 head: one decoder layer that reads the target's hidden states and drafts. Source: arXiv 2503.01840.

Files are the flat format (`midlayer.*`) and `speculators` packages (`layers.0.*`); their conventions differ: loading
says which it took.
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from ..errors import ModelUnsupportedError
from ..models import LoadedModel
from .checkpoint import check_target, fill, read_config, read_tensors
from .head_block import Attend, BlockShape, HeadBlock, block_shape

LOG = logging.getLogger(__name__)


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

    @property
    def block(self) -> BlockShape:
        """The decoder layer; its attention reads the token's embedding beside the hidden state."""
        bias = self.attention_bias
        return BlockShape(
            2 * self.hidden, self.hidden, self.heads, self.kv_heads, self.head_dim, self.intermediate, self.head_dim,
            self.eps, self.rope_theta, self.qk_norm, bias, bias,
        )  # fmt: skip


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
        self.midlayer = HeadBlock(config.block, input_norms=2)
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

    def enter(self, hidden: torch.Tensor, embedded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the layer's residual and its attention's input; embedding and hidden state have a norm each."""
        normed = self.midlayer.hidden_norm(hidden)
        residual = normed if self.config.norm_before_residual else hidden
        return residual, torch.cat([self.midlayer.input_layernorm(embedded), normed], -1)

    def leave(self, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits over the draft vocabulary and the hidden states that a next row goes on from."""
        normed = self.norm(out)
        return self.lm_head(normed), normed if self.config.recycle_normed else out

    def forward(
        self, hidden: torch.Tensor, embedded: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `leave` makes of the layer's output."""
        residual, x = self.enter(hidden, embedded)
        return self.leave(self.midlayer(residual, x, positions, attend))

    @property
    def block(self) -> HeadBlock:
        """The layer, whose keys and values are kept."""
        return self.midlayer

    @property
    def embedding(self) -> nn.Module | None:
        """Its own embedding of tokens, if it has one."""
        return self.embed_tokens if self.config.own_embedding else None

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's hidden states that it reads."""
        return self.config.taps

    @property
    def token_map(self) -> torch.Tensor | None:
        """The target's id of every draft id; None when they are the same."""
        config = self.config
        same = config.draft_vocab == config.vocab
        return None if same else self.target_ids(torch.arange(config.draft_vocab, device=self.d2t.device))

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Return the target's token ids; the file holds each one's distance from the draft id."""
        return draft_ids + self.d2t[draft_ids]


def load_eagle3(folder: Path, model: LoadedModel) -> Eagle3Head:
    """Return the head in `folder`, made for `model`.

    Raises: ModelUnsupportedError that names missing and unexpected tensors, or says how the head does not fit.
    """
    stated = read_config(folder)
    check_target(stated, model, folder)
    tensors = {name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in read_tensors(folder).items()}
    config = _config(stated, tensors, model)
    if config.draft_vocab != config.vocab and "d2t" not in tensors:
        raise ModelUnsupportedError(f"{folder}: a draft vocabulary of {config.draft_vocab} tokens needs the tensor d2t")
    if int(stated.get("transformer_layer_config", stated).get("num_hidden_layers", 1)) != 1:
        raise ModelUnsupportedError(f"{folder}: EAGLE-3 heads of more than one layer are not supported")
    tensors.pop("t2d", None)
    if config.draft_vocab == config.vocab:
        tensors.setdefault("d2t", torch.zeros(config.draft_vocab, dtype=torch.int64))
    head = Eagle3Head(config).to(model.dtype)
    fill(head, tensors, folder)
    ids = head.target_ids(torch.arange(config.draft_vocab))
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab:
        raise ModelUnsupportedError(f"{folder}: d2t leads outside the target's {config.vocab} tokens")
    LOG.info(
        "EAGLE-3 head %s: taps before layers %s, norm_before_residual %s, norm_before_fc %s, fc_norm %s, recycles %s",
        folder, config.taps, config.norm_before_residual, config.norm_before_fc, config.norm_each_tap,
        "normed" if config.recycle_normed else "raw",
    )  # fmt: skip
    return head.eval().requires_grad_(False)


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


def _config(stated: dict[str, Any], tensors: dict[str, torch.Tensor], model: LoadedModel) -> Eagle3Config:
    packaged, vocab = "speculators_model_type" in stated, model.shape.vocab_size
    layer: dict[str, Any] = stated.get("transformer_layer_config", stated)
    shape = block_shape(layer)
    draft_vocab = stated.get("draft_vocab_size") or stated.get("truncated_vocab_size") or layer.get("vocab_size")
    return Eagle3Config(
        hidden=shape.hidden,
        target_hidden=int(stated.get("target_hidden_size") or model.config.hidden_size),
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate=shape.intermediate,
        draft_vocab=int(draft_vocab or vocab),
        vocab=vocab,
        taps=taps(stated, int(model.config.num_hidden_layers), packaged),
        eps=shape.eps,
        rope_theta=shape.rope_theta,
        norm_before_residual=bool(stated.get("norm_before_residual", False)),
        norm_before_fc=bool(stated.get("norm_before_fc", False)) or "input_norm.weight" in tensors,
        norm_each_tap=bool(stated.get("fc_norm", False)) or "fc_norm.0.weight" in tensors,
        recycle_normed=packaged and bool(stated.get("norm_output", False)),
        qk_norm="midlayer.self_attn.q_norm.weight" in tensors,
        attention_bias=shape.qkv_bias,
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
