"""The recipe of the embedded target model."""

import json
from pathlib import Path

import numpy as np
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .chat import END_OF_TEXT, END_OF_TURN
from .dataset import Dataset, embedded_dataset
from .loop import Phase, Point, Recipe, TokenIds, TokenStream, train

VOCAB_SIZE = 4096
NUM_TASKS = 16_000
MAX_POSITIONS = 4096

TARGET_RECIPE = Recipe(
    name="target",
    seed=20_261_130,
    num_steps=1000,
    batch_tokens=8192,
    lr=3e-3,
    weight_decay=0.1,
    warmup_steps=40,
    phases=(Phase(512, 0.92, 2), Phase(2048, 0.08, 2)),
)


def target_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """Return the embedded target's shape: 11.8 million parameters, the embedding tied to the head."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=384,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(END_OF_TEXT),
    )


def train_base(run_dir: Path, output_dir: Path, recipe: Recipe = TARGET_RECIPE) -> Point:
    """Train the embedded target and write it to `output_dir` (safetensors, bf16); resumes a run in `run_dir`."""
    dataset = embedded_dataset(run_dir, VOCAB_SIZE, NUM_TASKS, recipe.seed)
    torch.manual_seed(recipe.seed)
    model = LlamaForCausalLM(target_config(dataset.tokenizer))
    loss_fn = torch.compile(lambda ids: next_token_loss(model, ids), dynamic=False)
    point = train(model, loss_fn, TokenStream(dataset.train_ids, recipe.seed), recipe, run_dir / recipe.name)
    held_out = held_out_loss(model, dataset.held_out_ids)
    export(model, dataset, output_dir, {"held_out_loss": held_out, "train_loss": point.loss, "steps": point.step})
    return point


def next_token_loss(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy, in nats a token, of predicting `ids[:, 1:]` from `ids[:, :-1]`."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, ids: TokenIds, num_windows: int = 48, window_tokens: int = 512) -> float:
    """Return the mean loss over evenly spread windows of text the model has not seen."""
    starts = np.linspace(0, len(ids) - window_tokens - 1, num_windows).astype(int)
    batch = torch.from_numpy(np.stack([ids[start : start + window_tokens + 1].astype(np.int64) for start in starts]))
    losses = [float(next_token_loss(model, part)) for part in batch.split(8)]
    return float(np.mean(losses))


def export(model: LlamaForCausalLM, dataset: Dataset, output_dir: Path, measured: dict[str, float]) -> None:
    """Write weights (bf16 safetensors), tokenizer, generation defaults and the measured losses to `output_dir`."""
    tokenizer = dataset.tokenizer
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.convert_tokens_to_ids(name) for name in (END_OF_TEXT, END_OF_TURN)],
        pad_token_id=tokenizer.convert_tokens_to_ids(END_OF_TEXT),
    )
    torch.nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)
    (output_dir / "training.json").write_text(json.dumps(measured, indent=1) + "\n")
