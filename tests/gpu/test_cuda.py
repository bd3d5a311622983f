"""The engine on a CUDA device: the same law as on the CPU, and the CPU's numbers up to rounding."""

import pytest
import torch

from specserve.deployments.llm import LLM
from specserve.service.messages import Sampling, ScoreRow
from specserve.service.models import embedded_dir, load_model
from specserve.service.paged_model import PagedModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
PROMPTS = ["def add(first, second):\n", "class Reader:\n    def __init__(self, path):\n", "import os\n"]


def test_hidden_states_are_the_cpus() -> None:
    rows = [
        ScoreRow("a", 0, tuple(range(5, 45)), 40, (0, 3, 1)),
        ScoreRow("b", 0, tuple(range(50, 57)), 7, (2,)),
        ScoreRow("c", 0, tuple(range(60, 65)), 5, (4,), parents=(0, 0, 1, 2)),
    ]
    there = PagedModel(load_model(embedded_dir("target"), torch.float32, "cuda"), 16, 16).forward(rows).cpu()
    here = PagedModel(load_model(embedded_dir("target"), torch.float32), 16, 16).forward(rows)
    assert torch.allclose(there, here, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(greedy=False, temperature=0.8, seed=5)], ids=["greedy", "seeded"]
)
def test_speculation_changes_no_token(sampling: Sampling) -> None:
    with LLM(dtype="float32", device="cuda", proposers=("draft", "prompt_lookup", "suffix")) as llm:
        plain = llm.generate(PROMPTS, max_tokens=48, sampling=sampling, mode="off", ignore_eos=True)
        for proposer in ("draft", "prompt_lookup", "suffix"):
            for gamma in (1, 4, 8):
                drafted = llm.generate(
                    PROMPTS,
                    max_tokens=48,
                    sampling=sampling,
                    mode="on",
                    max_draft_tokens=gamma,
                    proposer=proposer,
                    ignore_eos=True,
                )
                assert [done.token_ids for done in drafted] == [done.token_ids for done in plain]
