"""Files of drafting heads as others publish them, random, for tiny targets; and a decoder layer computed slowly."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from specserve.service.models import LoadedModel, ModelShape

Tensors = dict[str, torch.Tensor]


def bare_target(vocab: int, hidden: int, layers: int, dtype: torch.dtype = torch.float64) -> LoadedModel:
    """A random target of which a head asks sizes, embedding and head alone."""
    torch.manual_seed(6)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=8, num_hidden_layers=layers, num_attention_heads=1,
        num_key_value_heads=1, head_dim=4, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    whole = LlamaForCausalLM(config).to(dtype).eval()
    return LoadedModel(whole.model, whole.lm_head, config, dtype, ModelShape(vocab, 512, (0,)))


def write_head(folder: Path, config: dict[str, Any], tensors: Tensors, file: str = "model.safetensors") -> Path:
    """Write the two files and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
    else:
        torch.save(tensors, folder / file)
    return folder


def layer_config(model: LoadedModel, **changes: Any) -> dict[str, Any]:
    """What a head's configuration says of its layer: four heads of 16 on two key heads."""
    return {
        "hidden_size": model.config.hidden_size,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "vocab_size": model.shape.vocab_size,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500.0,
        "hidden_act": "silu",
    } | changes


def random_tensors(seed: int, shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
    """Random float64 tensors, small enough for a layer to keep its input's size; vectors lie round one."""
    made = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(*shape, generator=made, dtype=torch.float64) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.2)
        + (len(shape) == 1)
        for name, shape in shapes.items()
    }


def layer_shapes(hidden: int, width: int, gate: bool = False, prefix: str = "") -> dict[str, tuple[int, ...]]:
    """Names and shapes of attention, MLP and the norm between them, for the sizes of `layer_config`."""
    return {
        f"{prefix}self_attn.q_proj.weight": (128 if gate else 64, width),
        f"{prefix}self_attn.k_proj.weight": (32, width),
        f"{prefix}self_attn.v_proj.weight": (32, width),
        f"{prefix}self_attn.o_proj.weight": (hidden, 64),
        f"{prefix}mlp.gate_proj.weight": (48, hidden),
        f"{prefix}mlp.up_proj.weight": (48, hidden),
        f"{prefix}mlp.down_proj.weight": (hidden, 48),
        f"{prefix}post_attention_layernorm.weight": (hidden,),
    }


def eagle_files(folder: Path, model: LoadedModel, file: str = "pytorch_model.bin") -> tuple[Path, Tensors]:
    """An EAGLE-1 head as SafeAILab publishes them: pickled, without a first norm, the target's embedding repeated."""
    hidden = model.config.hidden_size
    shapes = layer_shapes(hidden, hidden, prefix="layers.0.") | {
        "fc.weight": (hidden, 2 * hidden),
        "fc.bias": (hidden,),
    }
    tensors = random_tensors(1, shapes)
    tensors["embed_tokens.weight"] = model.trunk.get_input_embeddings().weight.detach().clone()
    return write_head(folder, layer_config(model), tensors, file), tensors


def eagle3_files(folder: Path, model: LoadedModel, taps: tuple[int, int, int]) -> tuple[Path, Tensors]:
    """A flat EAGLE-3 head that knows every second token; its configuration names the layers that states leave."""
    hidden, vocab = model.config.hidden_size, model.shape.vocab_size
    shapes = layer_shapes(hidden, 2 * hidden, prefix="midlayer.") | {
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "fc.weight": (hidden, 3 * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (vocab // 2, hidden),
    }
    tensors = random_tensors(2, shapes) | {
        "d2t": torch.arange(vocab // 2),
        "t2d": torch.arange(vocab) % 2 == 0,
    }
    ids = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps]}
    config = layer_config(model, draft_vocab_size=vocab // 2, eagle_config=ids)
    return write_head(folder, config, tensors), tensors


def medusa_files(folder: Path, model: LoadedModel, num_heads: int = 5) -> tuple[Path, Tensors]:
    """Medusa-1 heads as published: a pickled state, and a configuration that names fewer heads than there are."""
    hidden, vocab = model.config.hidden_size, model.shape.vocab_size
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(num_heads):
        shapes |= {f"{head}.0.linear.weight": (hidden, hidden), f"{head}.0.linear.bias": (hidden,)}
        shapes[f"{head}.1.weight"] = (vocab, hidden)
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
    tensors = random_tensors(3, shapes)
    return write_head(folder, config, tensors, "medusa_lm_head.pt"), tensors


def residual_medusa_files(folder: Path, model: LoadedModel) -> tuple[Path, Tensors]:
    """Two Medusa heads of one block each, read out by the target's own head."""
    hidden = model.config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(2):
        shapes |= {f"{head}.0.linear.weight": (hidden, hidden), f"{head}.0.linear.bias": (hidden,)}
    tensors = random_tensors(5, shapes)
    return write_head(folder, {"original_lm_head": True}, tensors, "medusa_lm_head.safetensors"), tensors


def deepseek_files(folder: Path, model: LoadedModel, layers: int) -> tuple[Path, Tensors]:
    """The MTP layer of a DeepSeek-like checkpoint, embedding and head repeated, beside a layer of the target."""
    hidden, prefix = model.config.hidden_size, f"model.layers.{layers}."
    shapes = layer_shapes(hidden, hidden, prefix=prefix) | {
        prefix + "input_layernorm.weight": (hidden,),
        prefix + "enorm.weight": (hidden,),
        prefix + "hnorm.weight": (hidden,),
        prefix + "eh_proj.weight": (hidden, 2 * hidden),
        prefix + "shared_head.norm.weight": (hidden,),
        "model.layers.0.self_attn.q_proj.weight": (hidden, hidden),
    }
    tensors = random_tensors(4, shapes)
    tensors[prefix + "embed_tokens.weight"] = model.trunk.get_input_embeddings().weight.detach().clone()
    tensors[prefix + "shared_head.head.weight"] = model.head.weight.detach().clone()
    config = layer_config(model, num_hidden_layers=layers, num_nextn_predict_layers=1)
    return write_head(folder, config, tensors), tensors


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMSNorm with the epsilon of `layer_config`."""
    return x / torch.sqrt((x * x).mean() + 1e-5) * weight


class SlowLayer:
    """A decoder layer fed one row at a time, from its formulae; holds the keys and values of all rows before."""

    def __init__(self, tensors: Tensors, prefix: str, gate: bool = False, rotary: int = 16) -> None:
        self._weight: Callable[[str], torch.Tensor] = lambda name: tensors[f"{prefix}{name}.weight"]
        self._gate = gate
        self._rotary = rotary
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def row(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output for the row after those that came before."""
        position = len(self._keys)
        queries = (self._weight("self_attn.q_proj") @ x).view(4, -1)
        queries, gates = queries[:, :16], queries[:, 16:]
        keys = (self._weight("self_attn.k_proj") @ x).view(2, 16)
        self._keys.append(torch.stack([self._turned(key, position) for key in keys]))
        self._values.append((self._weight("self_attn.v_proj") @ x).view(2, 16))
        mixed = []
        for head in range(4):
            query = self._turned(queries[head], position)
            weights = torch.stack([query @ key[head // 2] / 4.0 for key in self._keys]).exp()
            seen = torch.stack([value[head // 2] for value in self._values])
            out = (weights / weights.sum()) @ seen
            mixed.append(out / (1 + torch.exp(-gates[head])) if self._gate else out)
        residual = residual + self._weight("self_attn.o_proj") @ torch.cat(mixed)
        inner = rms(residual, self._weight("post_attention_layernorm"))
        gate, up = self._weight("mlp.gate_proj") @ inner, self._weight("mlp.up_proj") @ inner
        return residual + self._weight("mlp.down_proj") @ (gate / (1 + torch.exp(-gate)) * up)

    def _turned(self, x: torch.Tensor, position: int) -> torch.Tensor:
        out, half = x.clone(), self._rotary // 2
        for i in range(half):
            angle = position * 500.0 ** (-2 * i / self._rotary)
            a, b = x[i], x[i + half]
            out[i] = a * math.cos(angle) - b * math.sin(angle)
            out[i + half] = b * math.cos(angle) + a * math.sin(angle)
        return out
