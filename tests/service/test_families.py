"""Every served family against transformers' own classes: logits of a packed batch, and text with and without drafts.

The models are tiny and random, in float64, with windows shorter than the prompts and soft caps that bite. The reference
attends in float64 too: transformers' own eager attention takes its softmax in float32, which alone moves logits by
1e-5.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cells import VOCAB_SIZE, Cell, Finished, FixedPlanner, ScriptedProposer
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import eager_mask

from specserve.service.families import SERVED
from specserve.service.messages import Sampling, ScoreRow
from specserve.service.paged_model import PagedModel
from specserve.service.requests import GenerationRequest

REFERENCE = "float64_reference"
SHARED: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.6,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GROUPED: Mapping[str, Any] = {"num_key_value_heads": 2}
ALTERNATING: Mapping[str, Any] = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
ROTARY: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
VISION: Mapping[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
GEMMA3: Mapping[str, Any] = {**GROUPED, **ALTERNATING, "head_dim": 16, "query_pre_attn_scalar": 12}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "apertus": {**GROUPED, "rope_parameters": ROTARY},
    "arcee": GROUPED,
    "cohere": {**GROUPED, "logit_scale": 0.25, "use_qk_norm": True},
    "cohere2": {**GROUPED, **ALTERNATING, "logit_scale": 0.25},
    "ernie4_5": {**GROUPED, "head_dim": 8},
    "exaone4": {**GROUPED, **ALTERNATING},
    "gemma": {"num_key_value_heads": 1, "head_dim": 16},
    "gemma2": {**GEMMA3, "attn_logit_softcapping": 10.0, "final_logit_softcapping": 5.0},
    "gemma3": {"text_config": {**SHARED, **GEMMA3}, "vision_config": VISION},
    "gemma3_text": GEMMA3,
    "glm": {**GROUPED, "head_dim": 16, "attention_bias": True},
    "glm4": {**GROUPED, "head_dim": 16},
    "gpt2": {"scale_attn_by_inverse_layer_idx": True},
    "gpt_neox": {},
    "gptj": {"rotary_dim": 4},
    "granite": {**GROUPED, "logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.7},
    "helium": {**GROUPED, "head_dim": 8},
    "hunyuan_v1_dense": {**GROUPED, "head_dim": 8},
    "llama": {**GROUPED, "head_dim": 8, "attention_bias": True},
    "ministral": {**GROUPED, **ALTERNATING, "head_dim": 8},
    "mistral": {**GROUPED, "sliding_window": 6},
    "olmo": {**GROUPED, "clip_qkv": 2.0},
    "olmo2": GROUPED,
    "olmo3": {**GROUPED, **ALTERNATING},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
    "phi": GROUPED,
    "phi3": {**GROUPED, "sliding_window": 6},
    "qwen2": {**GROUPED, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen3": {**GROUPED, "head_dim": 16},
    "seed_oss": GROUPED,
    "smollm3": {**GROUPED, "no_rope_layers": [1, 0]},
    "starcoder2": {**GROUPED, "sliding_window": 6},
}
VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "opt, norms first": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "llama, rotary scaled as in 3.1": (
        "llama",
        {
            **GROUPED,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "phi3, rotary on a part": ("phi3", {**GROUPED, "partial_rotary_factor": 0.5}),
    "qwen2, head tied to the embeddings": ("qwen2", {**GROUPED, "tie_word_embeddings": True}),
}
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    **{kind: (kind, fields) for kind, fields in FAMILIES.items()},
    **VARIANTS,
}
PROMPTS = (
    tuple((5, 9, 700, 31)[place % 4] + place // 8 for place in range(19)),
    tuple((11 * place) % 500 + 3 for place in range(13)),
)
NUM_TOKENS = 16


@dataclass(frozen=True)
class Family:
    """A random model of one family, in its folder and as a cell."""

    folder: Path
    cell: Cell

    def run(self, proposer: str | None) -> tuple[list[Finished], float]:
        """Return the engine's answers and the share of drafted tokens that was accepted."""
        planner = FixedPlanner(proposer, 4)
        requests = [
            GenerationRequest(str(number), prompt, Sampling(), NUM_TOKENS, num_logprobs=0)
            for number, prompt in enumerate(PROMPTS)
        ]
        done = self.cell.run(planner, requests, [ScriptedProposer("random")])
        num_drafted = sum(outcome.num_drafted for outcome in planner.outcomes)
        assert num_drafted or proposer in (None, "prompt_lookup")
        return done, sum(outcome.num_accepted for outcome in planner.outcomes) / max(1, num_drafted)


def reference_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Return textbook attention in the inputs' own precision."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return ((scores + attention_mask).softmax(-1) @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register(REFERENCE, reference_attention)
AttentionMaskInterface.register(REFERENCE, eager_mask)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small take twice as long on two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=CASES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    kind, fields = CASES[request.param]
    folder = tmp_path_factory.mktemp(kind)
    torch.manual_seed(4)
    shared = {} if "text_config" in fields else SHARED
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**shared, **fields}), dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases begin as ones and zeros, which would hide that one is left out
            parameter.data.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    return Family(folder, Cell(folder))


def reference(family: Family) -> Any:
    model = AutoModelForCausalLM.from_pretrained(family.folder, dtype=torch.float64, attn_implementation=REFERENCE)
    return model.eval()


def packed_logits(family: Family, fused: bool) -> torch.Tensor:
    """Return the logits at every position of both prompts, computed together on scattered pages."""
    model = family.cell.model
    paged = PagedModel(model, 64, 4, fused=fused)
    rows = [
        ScoreRow(str(number), 0, prompt, len(prompt), tuple(range(number, 64, 5)))
        for number, prompt in enumerate(PROMPTS)
    ]
    logits: torch.Tensor = model.head(paged.forward(rows))
    softcap = getattr(model.config, "final_logit_softcapping", None)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def generated(family: Family) -> tuple[list[tuple[int, ...]], list[torch.Tensor]]:
    """Return what transformers' `generate` makes of the prompts, and the log-probability of each token."""
    model = AutoModelForCausalLM.from_pretrained(family.folder, dtype=torch.float64, attn_implementation="eager").eval()
    tokens, logprobs = [], []
    for prompt in PROMPTS:
        made = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens.append(tuple(made.sequences[0, len(prompt) :].tolist()))
        logprobs.append(torch.log_softmax(torch.cat(made.logits).double(), -1).max(-1).values)
    return tokens, logprobs


def test_every_served_family_is_tested() -> None:
    assert set(FAMILIES) == set(SERVED)


@torch.inference_mode()
def test_a_packed_batch_gives_the_logits_of_separate_forwards(family: Family) -> None:
    model = reference(family)
    expected = torch.cat([model(torch.tensor([prompt]), use_cache=False).logits[0] for prompt in PROMPTS])
    torch.testing.assert_close(packed_logits(family, fused=False), expected, rtol=0, atol=1e-12)
    # Fused layers compute their norms in float64, transformers' modules in float32.
    torch.testing.assert_close(packed_logits(family, fused=True), expected, rtol=0, atol=1e-4)


@torch.inference_mode()
def test_greedy_text_is_that_of_generate_whatever_is_drafted(family: Family) -> None:
    """`draft` is the target itself, so all its drafts are accepted; those of `random` are not."""
    expected, logprobs = generated(family)
    (plain, _), (drafted, self_rate), (looked_up, _), (misled, random_rate) = (
        family.run(proposer) for proposer in (None, "draft", "prompt_lookup", "random")
    )
    assert [done.token_ids for done in plain] == expected
    assert [done.token_ids for done in drafted] == expected
    assert [done.token_ids for done in looked_up] == expected
    assert [done.token_ids for done in misled] == expected
    assert (self_rate, random_rate) == (1.0, 0.0)
    for done, theirs in zip(drafted, logprobs, strict=True):
        ours = [entry.logprob for step in done.steps for entry in step.logprobs]
        torch.testing.assert_close(torch.tensor(ours, dtype=torch.float64), theirs, rtol=0, atol=1e-4)
