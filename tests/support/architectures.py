"""Small random models of the families that have fused layers."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from specserve.service.models import LoadedModel, load_model

SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WITH_HEADS = {**SMALL, "head_dim": 16}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**WITH_HEADS),
    "llama_scaled": LlamaConfig(
        **WITH_HEADS,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral": MistralConfig(**WITH_HEADS, sliding_window=20),
    "qwen2": Qwen2Config(**{**SMALL, "hidden_size": 64}),
    "qwen3": Qwen3Config(**WITH_HEADS),
    "phi3": Phi3Config(**{**SMALL, "hidden_size": 64}),
    "gemma2": Gemma2Config(**WITH_HEADS, sliding_window=20, query_pre_attn_scalar=16, attn_logit_softcapping=5.0),
    "gemma3": Gemma3TextConfig(**WITH_HEADS, sliding_window=20, query_pre_attn_scalar=16),
    "olmo2": Olmo2Config(**{**SMALL, "hidden_size": 64}),
}


def loaded(folder: Path, config: Any, dtype: torch.dtype) -> LoadedModel:
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return load_model(folder, dtype)
