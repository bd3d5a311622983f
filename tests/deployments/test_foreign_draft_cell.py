"""A draft model with another tokenizer beside the embedded target: named by `draft` alone, whatever it drafts."""

from pathlib import Path

import pytest
import torch
from support.tokenizers import sentence_piece
from transformers import LlamaConfig, LlamaForCausalLM

from specserve.deployments.llm import LLM
from specserve.deployments.settings import ServiceSettings
from specserve.service.messages import Sampling

PROMPTS = ["def add(a, b):", "class Point:\n", "import os\n\nfor name in os.listdir("]


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("draft")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=720, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, initializer_range=0.6,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    sentence_piece(700).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(greedy=False, temperature=0.8, seed=3)], ids=["greedy", "seeded"]
)
def test_the_text_is_plain_decodings(draft: str, sampling: Sampling) -> None:
    settings = ServiceSettings(placement="inline", draft=draft, proposers=("draft",), num_pages=256)
    with LLM(settings=settings) as llm:
        plain = llm.generate(PROMPTS, max_tokens=24, sampling=sampling, mode="off")
        drafted = llm.generate(
            PROMPTS, max_tokens=24, sampling=sampling, mode="on", proposer="draft", max_draft_tokens=4
        )
    assert [one.text for one in drafted] == [one.text for one in plain]
    assert all(one.summary.num_draft_tokens > 0 for one in drafted)
