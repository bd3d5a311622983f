"""EAGLE-1 and EAGLE-2 heads: files as SafeAILab writes them, drafts against the paper's formulae, what is refused."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cells import save_tiny_llama
from support.heads import SlowLayer, Tensors, bare_target, eagle_files, layer_config, write_head
from transformers import AutoModelForCausalLM

from specserve.service.errors import ModelUnsupportedError
from specserve.service.messages import ProposeBatch, ProposeRow, Sampling, ScoreBatch, ScoreRow
from specserve.service.models import head_of, load_model
from specserve.service.proposers.attached import attach
from specserve.service.proposers.eagle import load_eagle
from specserve.service.target import Target

TOKENS = tuple((5 * place) % 90 + 3 for place in range(11))


def reference(tensors: Tensors, states: torch.Tensor, embed: torch.Tensor, head: torch.Tensor, gamma: int) -> list[int]:
    """The greedy draft after `TOKENS`, one row at a time; `states` come after the target's final norm."""
    layer = SlowLayer(tensors, "layers.0.")
    tokens, feature = list(TOKENS), states[0]
    for row in range(len(TOKENS) - 2 + gamma):
        feature = states[row] if row < len(TOKENS) - 1 else feature
        fused = tensors["fc.weight"] @ torch.cat([embed[tokens[row + 1]], feature]) + tensors["fc.bias"]
        feature = layer.row(fused, fused)
        if row >= len(TOKENS) - 2:
            tokens.append(int((head @ feature).argmax()))
    return tokens[len(TOKENS) :]


def test_a_draft_is_what_the_papers_formulae_give(tmp_path: Path) -> None:
    model = load_model(save_tiny_llama(tmp_path / "target", 1, layers=3), torch.float64)
    folder, tensors = eagle_files(tmp_path / "head", model)
    made, features = attach({"eagle": folder}, model, head_of(model), 8, 16, trees=False)
    Target(model, 8, 16, features).score(ScoreBatch(0, (ScoreRow("a", 0, TOKENS[:-1], 0, (4,)),)))
    row = ProposeRow("a", len(TOKENS), 0, TOKENS, 5, Sampling(), block_table=(4,))
    (draft,) = made["eagle"].propose(ProposeBatch(0, "eagle", (row,))).drafts
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float64)
    with torch.no_grad():
        states = whole.model(torch.tensor([TOKENS[:-1]])).last_hidden_state[0]
        expected = reference(tensors, states, whole.model.embed_tokens.weight, whole.lm_head.weight, 5)
    assert list(draft.token_ids) == expected
    assert len(set(expected)) > 1


def test_the_targets_embedding_may_be_repeated_or_absent(tmp_path: Path) -> None:
    model = bare_target(40, 32, 3)
    folder, tensors = eagle_files(tmp_path, model, "model.safetensors")
    assert load_eagle(folder, model, head_of(model)).embedding is None
    other = tensors | {"embed_tokens.weight": tensors["embed_tokens.weight"] + 1}
    assert load_eagle(write_head(tmp_path, layer_config(model), other), model, head_of(model)).embedding is not None
    del tensors["embed_tokens.weight"]
    assert load_eagle(write_head(tmp_path, layer_config(model), tensors), model, head_of(model)).embedding is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda config, tensors: tensors.pop("fc.bias"), "missing: fc.bias"),
        (lambda config, tensors: config.update(bias=False), "unexpected: fc.bias"),
        (lambda config, tensors: tensors.update({"layers.0.input_layernorm.weight": torch.ones(32)}), "unexpected"),
        (lambda config, tensors: tensors.pop("fc.weight"), "is no EAGLE-1"),
        (lambda config, tensors: config.update(vocab_size=41), "was made for 41 tokens; this target has 40"),
        (lambda config, tensors: config.update(hidden_size=64), "hidden states of 64; this target's are 32"),
        (lambda config, tensors: config.update(num_hidden_layers=2), "more than one layer"),
        (
            lambda config, tensors: config.update(
                speculators_config={"verifier": {"architectures": ["Qwen3ForCausalLM"]}}
            ),
            "made for a Qwen3ForCausalLM; this target is a LlamaForCausalLM",
        ),
    ],
)
def test_a_head_that_does_not_fit_is_refused_by_name(tmp_path: Path, change: Any, said: str) -> None:
    model = bare_target(40, 32, 3)
    _, tensors = eagle_files(tmp_path, model, "model.safetensors")
    config = layer_config(model)
    change(config, tensors)
    with pytest.raises(ModelUnsupportedError, match=said):
        load_eagle(write_head(tmp_path, config, tensors), model, head_of(model))


class _Opens:
    """What a hostile pickle holds: a call."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self._path), "w")


def test_a_pickled_file_that_would_run_code_is_refused_and_does_not_run(tmp_path: Path) -> None:
    model = bare_target(40, 32, 3)
    write_head(tmp_path, layer_config(model), {}, "pytorch_model.bin")
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": _Opens(tmp_path / "ran")}))
    with pytest.raises(ModelUnsupportedError, match=r"cannot read .*pytorch_model.bin"):
        load_eagle(tmp_path, model, head_of(model))
    assert not (tmp_path / "ran").exists()
