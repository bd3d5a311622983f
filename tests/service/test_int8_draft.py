"""Draft models in int8: products near the exact ones, drafts near the model's own, texts that are plain decoding's."""

import pytest
import torch

from specserve.deployments.llm import LLM
from specserve.deployments.settings import ServiceSettings
from specserve.service.errors import ModelUnsupportedError
from specserve.service.int8_linear import Int8Linear
from specserve.service.messages import ScoreRow
from specserve.service.models import LoadedModel, embedded_dir, head_of, load_model, load_tokenizer
from specserve.service.packed_linear import LinearKind, PackedLinear
from specserve.service.paged_model import PagedModel

PROMPTS = ["def add(a, b):", "class Point:\n", "import os\n\nfor name in os.listdir("]
TEXT = """def held_out(self, path, mode="r"):
    with open(path, mode) as file:
        for line in file:
            yield line.rstrip()
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 8, 33])
def test_a_product_is_that_of_weights_within_half_a_step_of_the_exact_ones(dtype: torch.dtype, rows: int) -> None:
    made = torch.Generator().manual_seed(rows)
    weight = torch.randn(50, 40, generator=made).to(dtype)
    weight[7] = 0
    bias, x = torch.randn(50, generator=made).to(dtype), torch.randn(rows, 40, generator=made).to(dtype)
    product = Int8Linear(weight, bias)
    kept = (Int8Linear(weight)(torch.eye(40, dtype=dtype)).double().T, weight.double())
    step = weight.double().abs().amax(1, keepdim=True) / 127
    rounding = 2**-7 if dtype == torch.bfloat16 else 1e-5
    assert bool(((kept[0] - kept[1]).abs() <= 0.51 * step + rounding * kept[1].abs()).all())
    exact = x.double() @ kept[0].T + bias.double()
    assert torch.allclose(product(x).double(), exact, rtol=rounding, atol=8 * rounding)
    assert all(torch.equal(product(x[row : row + 1])[0], whole) for row, whole in enumerate(product(x)))


def logits(model: LoadedModel, linear: LinearKind, tokens: list[int]) -> torch.Tensor:
    rows = [ScoreRow("a", 0, tuple(tokens), len(tokens), (0, 1, 2, 3))]
    with torch.inference_mode():
        return head_of(model, linear)(PagedModel(model, 4, 16, linear=linear).forward(rows)).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_embedded_draft_in_int8_says_nearly_what_it_said(dtype: torch.dtype) -> None:
    model = load_model(embedded_dir("draft"), dtype)
    tokens = load_tokenizer(embedded_dir("draft"))(TEXT)["input_ids"][:64]
    whole, rounded = (logits(model, linear, tokens) for linear in (PackedLinear, Int8Linear))
    assert not torch.equal(whole, rounded)
    assert float((whole - rounded).norm() / whole.norm()) < 0.05
    assert float((whole.argmax(-1) == rounded.argmax(-1)).float().mean()) > 0.9


def test_the_text_is_plain_decodings_and_drafts_are_accepted() -> None:
    settings = ServiceSettings(
        placement="inline", proposers=("draft",), draft_quantization="int8", dtype="float32", num_pages=256
    )
    with LLM(settings=settings) as llm:
        plain = llm.generate(PROMPTS, max_tokens=32, mode="off")
        drafted = llm.generate(PROMPTS, max_tokens=32, mode="on", proposer="draft", max_draft_tokens=4)
    assert [one.text for one in drafted] == [one.text for one in plain]
    assert sum(one.summary.num_accepted_tokens for one in drafted) > 10


def test_where_there_is_no_int8_that_is_said() -> None:
    with pytest.raises(ModelUnsupportedError, match=r"not torch\.float64"):
        Int8Linear(torch.zeros(4, 16, dtype=torch.float64))
    with pytest.raises(ModelUnsupportedError, match="a layer has 25"):
        Int8Linear(torch.zeros(4, 25))
    model = load_model(embedded_dir("draft"), torch.float32)
    with pytest.raises(
        ModelUnsupportedError, match="no int8 weights for this model here: head size, MLP size and page"
    ):
        PagedModel(model, 16, 8, linear=Int8Linear)
