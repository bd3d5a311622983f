"""Which models are served exactly, told from their configuration alone: what is refused is refused before weights load.

Other decoders run through the same attention without an error and with wrong tokens (attention sinks, ALiBi), so a
family is served once `tests/service/test_families.py` holds it equal to transformers.
"""

import math
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as ENCODERS

from .errors import ModelUnsupportedError

SERVED = (
    "apertus",
    "arcee",
    "cohere",
    "cohere2",
    "ernie4_5",
    "exaone4",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "glm",
    "glm4",
    "gpt2",
    "gpt_neox",
    "gptj",
    "granite",
    "helium",
    "hunyuan_v1_dense",
    "llama",
    "ministral",
    "mistral",
    "olmo",
    "olmo2",
    "olmo3",
    "opt",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "seed_oss",
    "smollm3",
    "starcoder2",
)
"""Model types in transformers' spelling; of `gemma3` only the text half is used."""

RECURRENT_KINDS = (
    "mamba",
    "rwkv",
    "jamba",
    "bamba",
    "zamba",
    "xlstm",
    "recurrent",
    "lfm2",
    "falcon_h1",
    "falcon-h1",
    "nemotron_h",
    "granitemoehybrid",
    "granitehybrid",
    "qwen3_next",
    "qwen3next",
    "qwen3_5",
    "qwen35",
    "kimi_linear",
)
"""Parts of model types, in transformers' spelling and in GGUF's."""

RECURRENT_LAYERS = ("linear_attention", "mamba", "recurrent", "hybrid", "conv", "ssm")
"""Parts of the names that configurations give to kinds of layers."""


def check_config(config: Any) -> None:
    """Return when the model is served exactly.

    Raises: ModelUnsupportedError, naming the model type and the reason.
    """
    kind, text = str(config.model_type), config.get_text_config()
    layer_kinds = [str(layer) for layer in getattr(text, "layer_types", None) or ()]
    refuse_kind(kind, layer_kinds, bool(getattr(config, "is_encoder_decoder", False)))
    if kind not in SERVED:
        raise ModelUnsupportedError(f"{kind} models are not served; those that are: {', '.join(SERVED)}")
    if getattr(text, "use_bidirectional_attention", False):
        raise ModelUnsupportedError(f"this {kind} model is an encoder: its tokens attend to later ones")
    if getattr(text, "add_cross_attention", False):
        raise ModelUnsupportedError(f"this {kind} model attends to another model's states, which is not served")
    max_positions(config)
    logit_scale(config)


def refuse_kind(kind: str, layer_kinds: list[str], encoder_decoder: bool) -> None:
    """Return when neither the model type nor its layers are of a kind that no token-by-token engine here can serve.

    Raises: ModelUnsupportedError.
    """
    if encoder_decoder or kind.startswith(("t5", "umt5")):
        raise ModelUnsupportedError(f"{kind} is an encoder-decoder model; only decoders are served")
    recurrent_layers = any(word in layer for layer in layer_kinds for word in RECURRENT_LAYERS)
    if recurrent_layers or any(word in kind for word in RECURRENT_KINDS):
        raise ModelUnsupportedError(
            f"{kind} has layers that keep a running state, which cannot be rolled back when a draft is rejected; "
            "it is not served"
        )
    if kind in ENCODERS or "bert" in kind:
        raise ModelUnsupportedError(f"{kind} is an encoder; it does not generate text")


def max_positions(config: Any) -> int:
    """Return how many positions a request may have.

    LongRoPE turns to other angles for *all* tokens once one position passes the original length, so a token would
    depend on the rest of its batch: such models end at that length.
    Raises: ModelUnsupportedError when the configuration does not say.
    """
    text = config.get_text_config()
    stated = getattr(text, "max_position_embeddings", None)
    if not isinstance(stated, int) or stated < 1:
        raise ModelUnsupportedError(f"{config.model_type}: the configuration states no max_position_embeddings")
    lengths = [stated]
    for rope in _rope_parameters(text):
        if rope.get("rope_type") == "longrope":
            original = rope.get("original_max_position_embeddings") or getattr(
                text, "original_max_position_embeddings", None
            )
            lengths.append(int(original or stated))
    return min(lengths)


def logit_scale(config: Any) -> float:
    """Return the factor between the head's product and the logits: a power of two, which no dtype rounds.

    Raises: ModelUnsupportedError for another factor.
    """
    text = config.get_text_config()
    kind = str(text.model_type)
    scale = 1.0
    if kind.startswith("cohere"):
        scale = float(text.logit_scale)
    elif kind.startswith("granite"):
        scale = 1 / float(text.logits_scaling)
    if scale <= 0 or math.frexp(scale)[0] != 0.5:
        raise ModelUnsupportedError(f"this {kind} model multiplies its logits by {scale:g}, which is no power of two")
    return scale


def _rope_parameters(text_config: Any) -> list[dict[str, Any]]:
    """Return the rotary settings: one for the model, or one for each kind of layer."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    return [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
