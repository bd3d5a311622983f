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
from .families import check_config, logit_scale, max_positions
from .messages import AttachedName
from .packed_linear import Head, LinearKind, PackedLinear
from .sources import ModelSource, local_folder, parse_source

DtypeName = Literal["auto", "bfloat16", "float32", "float64"]
DeviceName = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What an engine must know of a model without loading its weights."""

    vocab_size: int
    max_positions: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in two halves: `trunk` makes hidden states, `head` makes logits of them.

    Hidden states are those after the final norm. Only `final_logit_softcapping` is left for whoever runs the head.
    """

    trunk: nn.Module
    head: nn.Module
    config: Any
    dtype: torch.dtype
    shape: ModelShape


def embedded_dir(name: Literal["target", "draft"] | AttachedName) -> Path:
    """Return the folder of one of the models shipped with the package; not every head is shipped."""
    return Path(__file__).parent / "embedded" / name


def resolve_dtype(name: DtypeName) -> torch.dtype:
    """Return the torch dtype; `auto` is bfloat16 where the processor multiplies it natively, else float32."""
    if name == "auto":
        native = torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return torch.bfloat16 if native else torch.float32
    return cast(torch.dtype, getattr(torch, name))


def resolve_device(name: DeviceName) -> torch.device:
    """Return the torch device; `auto` is the GPU where there is one. Raises: ModelUnsupportedError without that GPU."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelUnsupportedError("there is no CUDA device here")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


def read_shape(model: ModelSource | Path | str) -> ModelShape:
    """Return the shape of a model; its files are downloaded or converted first if they are not here.

    Raises: ModelUnsupportedError when the model cannot be read or is of a kind that is not served.
    """
    folder = _folder(model)
    return _shape(folder, _config(folder))


def load_model(model: ModelSource | Path | str, dtype: torch.dtype, device: DeviceName = "cpu") -> LoadedModel:
    """Return a model on `device`, ready for packed forwards; safetensors only, no remote code.

    Raises: ModelUnsupportedError as `read_shape` does, and when weights are missing.
    """
    folder = _folder(model)
    config = _config(folder)
    register_attention()
    transformers_logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise ModelUnsupportedError(f"cannot load the model in {folder}: {_first_line(error)}") from error
    whole, loading = loaded
    if loading["missing_keys"]:
        some = ", ".join(sorted(loading["missing_keys"])[:3])
        raise ModelUnsupportedError(f"the model in {folder} lacks weights of a {config.model_type}: {some}")
    base = whole.to(resolve_device(device)).eval().base_model
    trunk = getattr(base, "language_model", base)
    head = _scaled(whole.get_output_embeddings(), logit_scale(config))
    return LoadedModel(trunk, head, whole.config.get_text_config(), dtype, _shape(folder, config))


def head_of(model: LoadedModel, linear: LinearKind = PackedLinear) -> Head:
    """Return a model's head, laid out for its device."""
    return Head(model.head, getattr(model.config, "final_logit_softcapping", None), linear)


def load_tokenizer(model: ModelSource | Path | str) -> PreTrainedTokenizerFast:
    """Return a model's tokenizer. Raises: ModelUnsupportedError when it has no fast one."""
    folder = _folder(model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise ModelUnsupportedError(f"cannot read a tokenizer from {folder}: {_first_line(error)}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelUnsupportedError(f"{folder} has no fast tokenizer (tokenizer.json)")
    # Its own first call would do this, and fail while another thread encodes.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def has_tokenizer(model: ModelSource | Path | str) -> bool:
    """Return whether a fast tokenizer lies beside a model's weights."""
    return (_folder(model) / "tokenizer.json").exists()


def _folder(model: ModelSource | Path | str) -> Path:
    if isinstance(model, Path):
        return model
    return local_folder(parse_source(model) if isinstance(model, str) else model)


def _config(folder: Path) -> Any:
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelUnsupportedError(f"cannot read a model from {folder}: {_first_line(error)}") from error
    check_config(config)
    return config


def _shape(folder: Path, config: Any) -> ModelShape:
    text_config = config.get_text_config()
    eos: int | list[int] | None = text_config.eos_token_id
    if (folder / "generation_config.json").exists():
        eos = GenerationConfig.from_pretrained(folder).eos_token_id or eos
    eos_token_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),)
    return ModelShape(int(text_config.vocab_size), max_positions(config), eos_token_ids)


def _scaled(head: nn.Module, scale: float) -> nn.Module:
    """Return `head`, or a copy that multiplies its logits by `scale`; a power of two changes no other bit."""
    if scale == 1.0:
        return head
    assert isinstance(head, nn.Linear)
    assert head.bias is None
    scaled = nn.Linear(head.in_features, head.out_features, bias=False, device="meta")
    scaled.weight = nn.Parameter(head.weight.detach() * scale, requires_grad=False)
    return scaled


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
