"""The recipe of a small draft model: the target's architecture family, its tokenizer, its distributions as labels."""

from pathlib import Path

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ..models import load_tokenizer
from .base import MAX_POSITIONS, NUM_TASKS, TARGET_RECIPE, VOCAB_SIZE, export, held_out_loss
from .chat import END_OF_TEXT
from .dataset import embedded_dataset
from .loop import Phase, Point, Recipe, TokenStream, train

DRAFT_RECIPE = Recipe(
    name="draft",
    seed=20_261_201,
    num_steps=700,
    batch_tokens=8192,
    lr=6e-3,
    weight_decay=0.05,
    warmup_steps=40,
    phases=(Phase(512, 1.0, 2),),
)


def draft_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """Return the embedded draft model's shape: 0.96 million parameters, a twelfth of the target's."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=448,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(END_OF_TEXT),
    )


def train_draft(target_dir: Path, run_dir: Path, output_dir: Path, recipe: Recipe = DRAFT_RECIPE) -> Point:
    """Distil a draft model from the target in `target_dir` and write it to `output_dir`; resumes from `run_dir`."""
    dataset = embedded_dataset(run_dir, VOCAB_SIZE, NUM_TASKS, TARGET_RECIPE.seed, load_tokenizer(target_dir))
    target = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()
    torch.manual_seed(recipe.seed)
    draft = LlamaForCausalLM(draft_config(dataset.tokenizer))
    loss_fn = torch.compile(lambda ids: distillation_loss(draft, target, ids), dynamic=False)
    point = train(draft, loss_fn, TokenStream(dataset.train_ids, recipe.seed), recipe, run_dir / recipe.name)
    held_out = held_out_loss(draft, dataset.held_out_ids)
    export(draft, dataset, output_dir, {"held_out_loss": held_out, "train_loss": point.loss, "steps": point.step})
    return point


def distillation_loss(draft: LlamaForCausalLM, target: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean KL(target || draft), in nats a position, over `ids[:, :-1]`. Source: arXiv 2310.08461."""
    with torch.no_grad():
        target_log_probs = functional.log_softmax(target(input_ids=ids[:, :-1], use_cache=False).logits, -1)
    draft_log_probs = functional.log_softmax(draft(input_ids=ids[:, :-1], use_cache=False).logits, -1)
    loss: torch.Tensor = functional.kl_div(
        draft_log_probs.flatten(0, 1), target_log_probs.flatten(0, 1), log_target=True, reduction="batchmean"
    )
    return loss
