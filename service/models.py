"""Loading a causal language model by transformers' own classes, split into trunk and head."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from .attention import ATTENTION_NAME, register_attention
from .errors import ModelUnsupportedError

DtypeName = Literal["auto", "bfloat16", "float32", "float64"]
REFUSED_LAYER_WORDS = ("mamba", "linear_attention", "recurrent", "rwkv", "ssm")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in two halves: `trunk` makes hidden states, `head` makes logits of them."""

    trunk: nn.Module
    head: nn.Module
    config: Any
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]

    @property
    def max_positions(self) -> int:
        """The longest context the model was made for, in tokens."""
        return int(self.config.max_position_embeddings)


def embedded_dir(name: Literal["target", "draft"]) -> Path:
    """Return the folder of one of the models shipped with the package."""
    return Path(__file__).parent / "embedded" / name


def resolve_dtype(name: DtypeName) -> torch.dtype:
    """Return the torch dtype; `auto` is bfloat16 where the processor multiplies it natively, else float32."""
    if name == "auto":
        native = torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return torch.bfloat16 if native else torch.float32
    return cast(torch.dtype, getattr(torch, name))


def load_model(model_dir: Path | str, dtype: torch.dtype) -> LoadedModel:
    """Return the model in `model_dir`, ready for packed forwards; safetensors only, no remote code.

    Raises: ModelUnsupportedError when the folder holds no causal model whose cache can be rolled back.
    """
    try:
        config = AutoConfig.from_pretrained(model_dir)
    except (OSError, ValueError) as error:
        raise ModelUnsupportedError(f"cannot read a model from {model_dir}: {error}") from error
    text_config = config.get_text_config()
    kinds = " ".join([*(getattr(text_config, "layer_types", None) or ()), str(config.model_type)])
    if config.is_encoder_decoder or any(word in kinds for word in REFUSED_LAYER_WORDS):
        raise ModelUnsupportedError(f"{config.model_type} keeps a state that cannot be rolled back; it is not served")
    register_attention()
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=dtype, attn_implementation=ATTENTION_NAME, use_safetensors=True
    ).eval()
    eos = model.generation_config.eos_token_id if model.generation_config is not None else None
    eos = text_config.eos_token_id if eos is None else eos
    eos_token_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),)
    return LoadedModel(model.base_model, model.get_output_embeddings(), text_config, dtype, eos_token_ids)


def load_tokenizer(model_dir: Path | str) -> PreTrainedTokenizerFast:
    """Return the tokenizer in `model_dir`."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelUnsupportedError(f"{model_dir} has no fast tokenizer (tokenizer.json)")
    return tokenizer
