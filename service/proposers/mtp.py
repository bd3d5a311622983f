"""Multi-token prediction: a decoder layer shipped in the target's own files, looped to draft. Source: arXiv 2412.19437.

The families spell the same module differently, join its two inputs in another order and norm in another way: `LAYOUTS`
is what they do, and loading says which it took. Only layers of plain attention and a dense MLP run here.
"""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from ..errors import ModelUnsupportedError
from ..models import LoadedModel
from ..packed_linear import Head
from .checkpoint import check_target, fill, read_config, read_tensors, without_copies
from .head_block import Attend, BlockShape, HeadBlock, block_shape

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Layout:
    """How one family writes the module. `{layer}` in `prefix` is the number of the target's layers; what `names` does
    not list belongs to the decoder layer, under `block`. `one_plus`: norms scale by one more than their weight."""

    name: str
    prefix: str
    names: Mapping[str, str]
    block: str = ""
    hidden_first: bool = False
    one_plus: bool = False


_SPELLED = {
    "token_layernorm": "token_norm",
    "hidden_layernorm": "hidden_norm",
    "input_proj": "join",
    "final_layernorm": "final_norm",
}
DEEPSEEK = Layout(
    "DeepSeek/GLM",
    "model.layers.{layer}.",
    {
        "enorm": "token_norm",
        "hnorm": "hidden_norm",
        "eh_proj": "join",
        "shared_head.norm": "final_norm",
        "shared_head.head": "head",
        "embed_tokens": "embed_tokens",
    },
)
LAYOUTS = (
    DEEPSEEK,
    Layout(
        "Qwen3-Next",
        "mtp.",
        {
            "pre_fc_norm_embedding": "token_norm",
            "pre_fc_norm_hidden": "hidden_norm",
            "fc": "join",
            "norm": "final_norm",
        },
        block="layers.0.",
        one_plus=True,
    ),
    Layout("MiMo", "model.mtp_layers.0.", _SPELLED, hidden_first=True),
    Layout("speculators", "mtp_layers.0.", _SPELLED),
)
REFUSED = {
    ".experts.": "experts",
    "kv_a_proj_with_mqa": "multi-head latent attention",
    "linear_attn": "a running state",
}


class MtpHead(nn.Module):
    """Goes on from its own normed output; `readout`, the target's head, makes tokens of that."""

    def __init__(
        self, shape: BlockShape, tap: int, vocab: int, readout: Callable[[torch.Tensor], torch.Tensor],
        hidden_first: bool = False, own_embedding: bool = False, own_head: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        if own_embedding:
            self.embed_tokens = nn.Embedding(vocab, shape.hidden)
        if own_head:
            self.head = nn.Linear(shape.hidden, vocab, bias=False)
        self.token_norm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.hidden_norm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.join = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.block = HeadBlock(shape, input_norms=1)
        self.final_norm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.vocab = vocab
        self.taps = (tap,)
        self.token_map = None
        self._hidden_first = hidden_first
        self._readout = readout

    @property
    def embedding(self) -> nn.Module | None:
        """Its own embedding of tokens, if it has one."""
        return getattr(self, "embed_tokens", None)

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        """Return the target's hidden states as they are."""
        return taps

    def enter(self, hidden: torch.Tensor, embedded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the joined row, and the same normed for the attention."""
        parts = [self.token_norm(embedded), self.hidden_norm(hidden)]
        joined = self.join(torch.cat(parts[::-1] if self._hidden_first else parts, -1))
        return joined, self.block.input_layernorm(joined)

    def leave(self, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits over the target's vocabulary and the normed output, which the next row goes on from."""
        normed = self.final_norm(out)
        return self.head(normed) if hasattr(self, "head") else self._readout(normed), normed

    def forward(
        self, hidden: torch.Tensor, embedded: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `leave` makes of the layer's output."""
        residual, x = self.enter(hidden, embedded)
        return self.leave(self.block(residual, x, positions, attend))


def load_mtp(folder: Path, model: LoadedModel, readout: Head) -> MtpHead:
    """Return the first MTP module in `folder`, which may be the target's own.

    Raises: ModelUnsupportedError that names missing and unexpected tensors, or says how the module does not fit.
    """
    outer = read_config(folder)
    stated = outer.get("text_config") or outer.get("transformer_layer_config") or outer
    check_target(outer | stated, model, folder)
    layout, found = _found(folder, int(stated["num_hidden_layers"]))
    for part, kind in REFUSED.items():
        if any(part in name for name in found):
            raise ModelUnsupportedError(f"{folder}: its MTP layer has {kind}, which is not supported")
    embed = model.trunk.get_input_embeddings().weight  # type: ignore[operator]  # a transformers model
    target_head = model.head.weight
    assert isinstance(target_head, torch.Tensor)
    tensors = without_copies(_renamed(found, layout), {"embed_tokens.weight": embed, "head.weight": target_head})
    queries = tensors.get("block.self_attn.q_proj.weight")
    plain = block_shape(stated)
    shape = block_shape(
        stated,
        qk_norm="block.self_attn.q_norm.weight" in tensors,
        qkv_bias="block.self_attn.q_proj.bias" in tensors,
        output_bias="block.self_attn.o_proj.bias" in tensors,
        output_gate=queries is not None and queries.shape[0] == 2 * plain.heads * plain.head_dim,
    )
    if shape.hidden != model.config.hidden_size:
        raise ModelUnsupportedError(
            f"{folder} was made for hidden states of {shape.hidden}; this target's are {model.config.hidden_size}"
        )
    own = "embed_tokens.weight" in tensors, "head.weight" in tensors
    tap, vocab = int(model.config.num_hidden_layers), model.shape.vocab_size
    head = MtpHead(shape, tap, vocab, readout, layout.hidden_first, *own)
    fill(head.to(model.dtype), tensors, folder)
    LOG.info(
        "MTP module %s: %s layout, joins %s, output gate %s, own embedding %s, own head %s, recycles normed", folder,
        layout.name, "[hidden, embedding]" if layout.hidden_first else "[embedding, hidden]", shape.output_gate, *own,
    )  # fmt: skip
    return head.eval().requires_grad_(False)


def _found(folder: Path, target_layers: int) -> tuple[Layout, dict[str, torch.Tensor]]:
    """Return the layout of the files in `folder`, and the module's tensors without their prefix."""
    prefixes = {layout.prefix.format(layer=target_layers): layout for layout in LAYOUTS}
    tensors = read_tensors(folder, lambda name: name.startswith(tuple(prefixes)))
    for prefix, layout in prefixes.items():
        own = {name.removeprefix(prefix): some for name, some in tensors.items() if name.startswith(prefix)}
        if own:
            return layout, own
    named = ", ".join(f"{prefix}* ({layout.name})" for prefix, layout in prefixes.items())
    raise ModelUnsupportedError(f"{folder} has no MTP module; looked for {named}")


def _renamed(found: Mapping[str, torch.Tensor], layout: Layout) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in found.items():
        stem, _, kind = name.rpartition(".")
        if stem in layout.names:
            ours = f"{layout.names[stem]}.{kind}"
        else:
            ours = f"block.{name.removeprefix(layout.block)}" if name.startswith(layout.block) else name
        tensors[ours] = tensor.float() + 1 if layout.one_plus and "norm" in ours.rpartition(".")[0] else tensor
    return tensors


def save_mtp(head: MtpHead, folder: Path, target_layers: int, extra: dict[str, Any]) -> None:
    """Write `head` in DeepSeek's and GLM's layout, in bf16; `extra` goes into the configuration."""
    shape, prefix = head.block.shape, DEEPSEEK.prefix.format(layer=target_layers)
    spelled = {ours: theirs for theirs, ours in DEEPSEEK.names.items()}
    state: dict[str, torch.Tensor] = {}
    for name, tensor in head.state_dict().items():
        stem, _, kind = name.rpartition(".")
        theirs = f"{spelled[stem]}.{kind}" if stem in spelled else name.removeprefix("block.")
        state[prefix + theirs] = tensor.to(torch.bfloat16).contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "model.safetensors")
    stated = {
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": head.vocab,
        "num_hidden_layers": target_layers,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "attention_bias": shape.qkv_bias,
    }
    (folder / "config.json").write_text(json.dumps(stated | extra, indent=1) + "\n")
