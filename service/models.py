"""Loading a causal language model by transformers' own classes, split into trunk and head."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from .attention import ATTENTION_NAME, register_attention
from .errors import ModelUnsupportedError

DtypeName = Literal["auto", "bfloat16", "float32", "float64"]
REFUSED_LAYER_WORDS = ("mamba", "linear_attention", "recurrent", "rwkv", "ssm")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What an engine must know of a model without loading its weights."""

    vocab_size: int
    max_positions: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in two halves: `trunk` makes hidden states, `head` makes logits of them."""

    trunk: nn.Module
    head: nn.Module
    config: Any
    dtype: torch.dtype
    shape: ModelShape


def embedded_dir(name: Literal["target", "draft"]) -> Path:
    """Return the folder of one of the models shipped with the package."""
    return Path(__file__).parent / "embedded" / name


def resolve_dtype(name: DtypeName) -> torch.dtype:
    """Return the torch dtype; `auto` is bfloat16 where the processor multiplies it natively, else float32."""
    if name == "auto":
        native = torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return torch.bfloat16 if native else torch.float32
    return cast(torch.dtype, getattr(torch, name))


def read_shape(model_dir: Path | str) -> ModelShape:
    """Return the shape of the model in `model_dir`.

    Raises: ModelUnsupportedError when it is no causal model whose cache can be rolled back.
    """
    try:
        config = AutoConfig.from_pretrained(model_dir)
    except (OSError, ValueError) as error:
        raise ModelUnsupportedError(f"cannot read a model from {model_dir}: {error}") from error
    text_config = config.get_text_config()
    kinds = " ".join([*(getattr(text_config, "layer_types", None) or ()), str(config.model_type)])
    if config.is_encoder_decoder or any(word in kinds for word in REFUSED_LAYER_WORDS):
        raise ModelUnsupportedError(f"{config.model_type} keeps a state that cannot be rolled back; it is not served")
    eos: int | list[int] | None = text_config.eos_token_id
    if (Path(model_dir) / "generation_config.json").exists():
        eos = GenerationConfig.from_pretrained(model_dir).eos_token_id or eos
    eos_token_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),)
    return ModelShape(int(text_config.vocab_size), int(text_config.max_position_embeddings), eos_token_ids)


def load_model(model_dir: Path | str, dtype: torch.dtype) -> LoadedModel:
    """Return the model in `model_dir`, ready for packed forwards; safetensors only, no remote code.

    Raises: ModelUnsupportedError as `read_shape` does.
    """
    shape = read_shape(model_dir)
    register_attention()
    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=dtype, attn_implementation=ATTENTION_NAME, use_safetensors=True
    ).eval()
    return LoadedModel(model.base_model, model.get_output_embeddings(), model.config.get_text_config(), dtype, shape)


def load_tokenizer(model_dir: Path | str) -> PreTrainedTokenizerFast:
    """Return the tokenizer in `model_dir`."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelUnsupportedError(f"{model_dir} has no fast tokenizer (tokenizer.json)")
    return tokenizer
