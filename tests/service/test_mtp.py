"""MTP modules: each family's names, order and norms, drafts against the paper's formulae, what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.cells import save_tiny_llama
from support.heads import (
    SlowLayer,
    Tensors,
    bare_target,
    deepseek_files,
    layer_config,
    layer_shapes,
    random_tensors,
    rms,
    write_head,
)
from transformers import AutoModelForCausalLM

from specserve.service.errors import ModelUnsupportedError
from specserve.service.messages import ProposeBatch, ProposeRow, Sampling, ScoreBatch, ScoreRow
from specserve.service.models import LoadedModel, head_of, load_model
from specserve.service.proposers.attached import attach
from specserve.service.proposers.mtp import load_mtp, save_mtp
from specserve.service.target import Target

LAYERS = 3
TOKENS = tuple((5 * place) % 90 + 3 for place in range(11))
MIMO = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj"}
MIMO |= {"shared_head.norm": "final_layernorm"}
QWEN = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "shared_head.norm": "norm"}


def spelled(tensors: Tensors, names: dict[str, str], prefix: str, layer: str = "") -> Tensors:
    """A family's own names for DeepSeek's, without the repeated embedding and head."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        stem, _, kind = name.removeprefix(f"model.layers.{LAYERS}.").rpartition(".")
        if stem not in ("embed_tokens", "shared_head.head") and not name.startswith("model.layers.0."):
            found[prefix + (names[stem] if stem in names else layer + stem) + "." + kind] = tensor
    return found


def files(folder: Path, model: LoadedModel, family: str) -> tuple[Path, Tensors]:
    """A checkpoint of `family`, and the same tensors under DeepSeek's names without prefix."""
    path, tensors = deepseek_files(folder, model, LAYERS)
    config = layer_config(model, num_hidden_layers=LAYERS)
    if family == "mimo":
        shapes = {f"model.layers.{LAYERS}.self_attn.{part}_proj.bias": (size,) for part, size in BIASES.items()}
        tensors |= random_tensors(8, shapes)
        write_head(folder, config, spelled(tensors, MIMO, "model.mtp_layers.0."))
    elif family == "qwen3_next":
        hidden, prefix = model.config.hidden_size, f"model.layers.{LAYERS}."
        tensors |= random_tensors(9, layer_shapes(hidden, hidden, gate=True, prefix=prefix))
        written = spelled(tensors, QWEN, "mtp.", "layers.0.")
        written = {name: some - 1 if "norm" in name else some for name, some in written.items()}
        write_head(folder, config | {"partial_rotary_factor": 0.25}, written)
    elif family == "speculators":
        write_head(
            folder,
            {"speculators_model_type": "mtp", "transformer_layer_config": config},
            spelled(tensors, MIMO, "mtp_layers.0."),
        )
    return path, {name.removeprefix(f"model.layers.{LAYERS}."): tensor for name, tensor in tensors.items()}


BIASES = {"q": 64, "k": 32, "v": 32}


class BiasedLayer(SlowLayer):
    """The slow layer on an input with a last number of one, whose weight is the bias."""

    def __init__(self, tensors: Tensors) -> None:
        widened = dict(tensors)
        for part in BIASES:
            name = f"self_attn.{part}_proj"
            widened[f"{name}.weight"] = torch.cat([tensors[f"{name}.weight"], tensors[f"{name}.bias"][:, None]], 1)
        super().__init__(widened, "")

    def row(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return super().row(residual, torch.cat([x, x.new_ones(1)]))


def reference(
    tensors: Tensors, family: str, states: torch.Tensor, embed: torch.Tensor, head: torch.Tensor, gamma: int
) -> list[int]:
    """The greedy draft after `TOKENS`, one row at a time; `states` come after the target's final norm."""
    gated = family == "qwen3_next"
    layer = BiasedLayer(tensors) if family == "mimo" else SlowLayer(tensors, "", gated, 4 if gated else 16)
    tokens, hidden = list(TOKENS), states[0]
    for row in range(len(TOKENS) - 2 + gamma):
        hidden = states[row] if row < len(TOKENS) - 1 else hidden
        parts = [rms(embed[tokens[row + 1]], tensors["enorm.weight"]), rms(hidden, tensors["hnorm.weight"])]
        joined = tensors["eh_proj.weight"] @ torch.cat(parts[::-1] if family == "mimo" else parts)
        out = layer.row(joined, rms(joined, tensors["input_layernorm.weight"]))
        hidden = rms(out, tensors["shared_head.norm.weight"])
        if row >= len(TOKENS) - 2:
            tokens.append(int((head @ hidden).argmax()))
    return tokens[len(TOKENS) :]


@pytest.mark.parametrize("family", ["deepseek", "qwen3_next", "mimo", "speculators"])
def test_a_draft_is_what_the_familys_formulae_give(tmp_path: Path, family: str) -> None:
    model = load_model(save_tiny_llama(tmp_path / "target", 1, layers=LAYERS), torch.float64)
    folder, tensors = files(tmp_path / "head", model, family)
    made, features = attach({"mtp": folder}, model, head_of(model), 8, 16, trees=False)
    Target(model, 8, 16, features).score(ScoreBatch(0, (ScoreRow("a", 0, TOKENS[:-1], 0, (4,)),)))
    row = ProposeRow("a", len(TOKENS), 0, TOKENS, 5, Sampling(), block_table=(4,))
    (draft,) = made["mtp"].propose(ProposeBatch(0, "mtp", (row,))).drafts
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float64)
    with torch.no_grad():
        states = whole.model(torch.tensor([TOKENS[:-1]])).last_hidden_state[0]
        expected = reference(tensors, family, states, whole.model.embed_tokens.weight, whole.lm_head.weight, 5)
    assert list(draft.token_ids) == expected
    assert len(set(expected)) > 1


def test_only_the_modules_tensors_of_a_whole_sharded_model_are_read(tmp_path: Path) -> None:
    model = bare_target(40, 32, LAYERS)
    folder, tensors = deepseek_files(tmp_path, model, LAYERS)
    own = {name: tensor for name, tensor in tensors.items() if name.startswith(f"model.layers.{LAYERS}.")}
    (folder / "model.safetensors").unlink()
    save_file(own, folder / "model-00002-of-00002.safetensors")
    shards = {name: "model-00002-of-00002.safetensors" if name in own else "absent.safetensors" for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    head = load_mtp(folder, model, head_of(model))
    assert head.embedding is None
    assert not hasattr(head, "head")


def test_an_embedding_and_a_head_that_are_not_the_targets_are_used(tmp_path: Path) -> None:
    model, prefix = bare_target(40, 32, LAYERS), f"model.layers.{LAYERS}."
    folder, tensors = deepseek_files(tmp_path, model, LAYERS)
    for name in ("embed_tokens.weight", "shared_head.head.weight"):
        tensors[prefix + name] = tensors[prefix + name] + 1
    head = load_mtp(write_head(folder, layer_config(model, num_hidden_layers=LAYERS), tensors), model, head_of(model))
    assert head.embedding is not None
    assert torch.equal(head.head.weight, tensors[prefix + "shared_head.head.weight"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda config, own: own.pop("enorm.weight"), "missing: token_norm.weight"),
        (lambda config, own: own.update({"self_attn.sinks": torch.zeros(4)}), "unexpected: block.self_attn.sinks"),
        (lambda config, own: own.update({"mlp.experts.0.up_proj.weight": torch.zeros(4)}), "has experts"),
        (lambda config, own: own.update({"self_attn.kv_a_proj_with_mqa.weight": torch.zeros(4)}), "latent attention"),
        (lambda config, own: own.update({"linear_attn.conv1d.weight": torch.zeros(4)}), "has a running state"),
        (lambda config, own: own.clear(), "has no MTP module; looked for model.layers.3"),
        (lambda config, own: config.update(vocab_size=41), "was made for 41 tokens"),
        (lambda config, own: config.update(hidden_size=64), "hidden states of 64"),
    ],
)
def test_a_module_that_does_not_fit_is_refused_by_name(tmp_path: Path, change: Any, said: str) -> None:
    model, prefix = bare_target(40, 32, LAYERS), f"model.layers.{LAYERS}."
    _, tensors = deepseek_files(tmp_path, model, LAYERS)
    own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    config = layer_config(model, num_hidden_layers=LAYERS)
    change(config, own)
    written = {prefix + name: tensor for name, tensor in own.items()}
    with pytest.raises(ModelUnsupportedError, match=said):
        load_mtp(write_head(tmp_path, config, written), model, head_of(model))


def test_what_is_saved_loads_as_the_same_module(tmp_path: Path) -> None:
    model = bare_target(40, 32, LAYERS)
    head = load_mtp(deepseek_files(tmp_path / "a", model, LAYERS)[0], model, head_of(model))
    save_mtp(head, tmp_path / "b", LAYERS, {"note": "kept"})
    again = load_mtp(tmp_path / "b", model, head_of(model))
    assert again.block.shape == head.block.shape
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor.to(torch.bfloat16).double()), name
