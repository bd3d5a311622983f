"""EAGLE-3 heads: files as others write them, and the module against a slow reference written from the paper."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.heads import bare_target, write_head

from specserve.service.errors import ModelUnsupportedError
from specserve.service.proposers.eagle3 import Eagle3Head, load_eagle3, save_eagle3, taps

HIDDEN, TARGET_HIDDEN, HEADS, KV_HEADS, DIM, MLP, VOCAB, DRAFT_VOCAB = 8, 6, 4, 2, 4, 12, 20, 10
LAYERS = 12


def flat_config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": HIDDEN,
        "target_hidden_size": TARGET_HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "intermediate_size": MLP,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT_VOCAB,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500.0,
    } | changes


def flat_tensors() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made, dtype=torch.float64)

    return {
        "fc.weight": random(HIDDEN, 3 * TARGET_HIDDEN),
        "midlayer.self_attn.q_proj.weight": random(HEADS * DIM, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": random(KV_HEADS * DIM, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": random(KV_HEADS * DIM, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": random(HIDDEN, HEADS * DIM),
        "midlayer.hidden_norm.weight": random(HIDDEN),
        "midlayer.input_layernorm.weight": random(HIDDEN),
        "midlayer.post_attention_layernorm.weight": random(HIDDEN),
        "midlayer.mlp.gate_proj.weight": random(MLP, HIDDEN),
        "midlayer.mlp.up_proj.weight": random(MLP, HIDDEN),
        "midlayer.mlp.down_proj.weight": random(HIDDEN, MLP),
        "norm.weight": random(HIDDEN),
        "lm_head.weight": random(DRAFT_VOCAB, HIDDEN),
        "d2t": torch.arange(DRAFT_VOCAB),  # draft id i is the target's 2 i
        "t2d": torch.arange(VOCAB) % 2 == 0,
    }


def load(folder: Path) -> Eagle3Head:
    return load_eagle3(folder, bare_target(VOCAB, TARGET_HIDDEN, LAYERS))


def reference_row(
    tensors: dict[str, torch.Tensor], rows: list[tuple[torch.Tensor, torch.Tensor]], normed_residual: bool
) -> tuple[list[float], torch.Tensor]:
    """Logits and hidden state of the last of `rows` (hidden state, embedding), which stand at positions 0, 1, ..."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean() + 1e-5) * tensors[name]

    def rotated(x: torch.Tensor, position: int) -> torch.Tensor:
        out = x.clone()
        for i in range(DIM // 2):
            angle = position * 500.0 ** (-2 * i / DIM)
            a, b = x[i], x[i + DIM // 2]
            out[i] = a * math.cos(angle) - b * math.sin(angle)
            out[i + DIM // 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    layer = "midlayer."
    keys, values = [], []
    for position, (hidden, embedded) in enumerate(rows):
        normed = norm(hidden, layer + "hidden_norm.weight")
        x = torch.cat([norm(embedded, layer + "input_layernorm.weight"), normed])
        key = (tensors[layer + "self_attn.k_proj.weight"] @ x).view(KV_HEADS, DIM)
        keys.append([rotated(head, position) for head in key])
        values.append((tensors[layer + "self_attn.v_proj.weight"] @ x).view(KV_HEADS, DIM))
    position = len(rows) - 1
    query = (tensors[layer + "self_attn.q_proj.weight"] @ x).view(HEADS, DIM)
    mixed = []
    for head in range(HEADS):
        shared = head // (HEADS // KV_HEADS)
        scores = torch.stack([rotated(query[head], position) @ key[shared] for key in keys]) / math.sqrt(DIM)
        weights = scores.exp() / scores.exp().sum()
        mixed.append(sum(w * value[shared] for w, value in zip(weights, values, strict=True)))
    residual = normed if normed_residual else hidden
    out = residual + tensors[layer + "self_attn.o_proj.weight"] @ torch.cat(mixed)
    inner = norm(out, layer + "post_attention_layernorm.weight")
    gate = tensors[layer + "mlp.gate_proj.weight"] @ inner
    up = tensors[layer + "mlp.up_proj.weight"] @ inner
    out = out + tensors[layer + "mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up)
    return (tensors["lm_head.weight"] @ norm(out, "norm.weight")).tolist(), out


class Causal:
    """Dense causal attention over rows of one sequence, one call a row."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self.keys.append(key)
        self.values.append(value)
        group = HEADS // KV_HEADS
        keys = torch.stack(self.keys).repeat_interleave(group, 1)
        values = torch.stack(self.values).repeat_interleave(group, 1)
        weights = (torch.einsum("hd,khd->hk", query, keys) * DIM**-0.5).softmax(-1)
        return torch.einsum("hk,khd->hd", weights, values)


@pytest.mark.parametrize("normed_residual", [False, True])
def test_a_flat_file_drafts_what_the_papers_formulae_give(tmp_path: Path, normed_residual: bool) -> None:
    tensors = flat_tensors()
    head = load(write_head(tmp_path, flat_config(norm_before_residual=normed_residual), tensors))
    made = torch.Generator().manual_seed(4)
    features = torch.randn(3, 3 * TARGET_HIDDEN, generator=made, dtype=torch.float64)
    embedded = torch.randn(5, HIDDEN, generator=made, dtype=torch.float64)
    memory = Causal()
    rows = [(tensors["fc.weight"] @ features[i], embedded[i]) for i in range(3)]
    for i in range(3):
        logits, hidden = head(head.fuse(features[i]), embedded[i], torch.tensor(i), memory.attend)
    for step in (3, 4):  # the drafted rows go on from the head's own hidden state
        expected, recycled = reference_row(tensors, rows, normed_residual)
        assert torch.allclose(logits, torch.tensor(expected, dtype=torch.float64), atol=1e-10)
        assert torch.allclose(hidden, recycled, atol=1e-10)
        rows.append((recycled, embedded[step]))
        logits, hidden = head(hidden, embedded[step], torch.tensor(step), memory.attend)
    assert head.target_ids(torch.tensor([0, 3, 9])).tolist() == [0, 6, 18]


def test_a_speculators_package_is_the_same_head_under_other_names(tmp_path: Path) -> None:
    flat = load(write_head(tmp_path / "flat", flat_config(), flat_tensors()))
    package = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_aux_hidden_state_layer_ids": [2, 5, 9],
        "norm_before_residual": False,
        "target_hidden_size": TARGET_HIDDEN,
        "transformer_layer_config": {
            name: flat_config()[name]
            for name in (
                "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
                "vocab_size", "rms_norm_eps", "rope_theta",
            )
        },
    }  # fmt: skip
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in flat_tensors().items()}
    renamed["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN, dtype=torch.float64)
    packaged = load(write_head(tmp_path / "package", package, renamed))
    assert packaged.config.taps == (2, 5, 9)
    assert packaged.config.own_embedding
    x = torch.randn(HIDDEN, dtype=torch.float64)
    ours, theirs = (head(x, x, torch.tensor(0), Causal().attend)[0] for head in (flat, packaged))
    assert torch.equal(ours, theirs)


def test_layer_ids_are_counted_as_each_format_counts() -> None:
    assert taps({}, 32, packaged=False) == (2, 16, 29)
    assert taps({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}, 32, packaged=False) == (2, 16, 29)
    assert taps({"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}, 32, packaged=True) == (2, 16, 29)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda config, tensors: tensors.pop("norm.weight"), "missing: norm.weight"),
        (lambda config, tensors: tensors.update(extra=torch.zeros(1)), "unexpected: extra"),
        (lambda config, tensors: tensors.update({"fc.weight": torch.zeros(HIDDEN, 5)}), "fc.weight is"),
        (lambda config, tensors: config.update(vocab_size=VOCAB + 1), "was made for 21 tokens"),
        (lambda config, tensors: tensors.pop("d2t"), "needs the tensor d2t"),
        (lambda config, tensors: tensors.update(d2t=torch.full((DRAFT_VOCAB,), VOCAB)), "outside the target's"),
        (lambda config, tensors: config.update(num_hidden_layers=2), "more than one layer"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_by_name(tmp_path: Path, change: Any, said: str) -> None:
    config, tensors = flat_config(), flat_tensors()
    change(config, tensors)
    with pytest.raises(ModelUnsupportedError, match=said):
        load(write_head(tmp_path, config, tensors))


@pytest.mark.parametrize("flags", [{"norm_before_fc": True}, {"fc_norm": True}])
def test_norms_before_the_fusion_are_taken_from_the_file(tmp_path: Path, flags: dict[str, bool]) -> None:
    tensors = flat_tensors()
    scales = torch.rand(3 * TARGET_HIDDEN, dtype=torch.float64)
    if "fc_norm" in flags:
        tensors |= {f"fc_norm.{i}.weight": part for i, part in enumerate(scales.chunk(3))}
    else:
        tensors["input_norm.weight"] = scales
    head = load(write_head(tmp_path, flat_config(**flags), tensors))
    x = torch.randn(3 * TARGET_HIDDEN, dtype=torch.float64)
    parts = x.chunk(3) if "fc_norm" in flags else [x]
    normed = torch.cat([part / torch.sqrt((part * part).mean() + 1e-5) for part in parts]) * scales
    assert torch.allclose(head.fuse(x), tensors["fc.weight"] @ normed, atol=1e-12)


def test_what_is_saved_loads_as_the_same_head(tmp_path: Path) -> None:
    head = load(write_head(tmp_path / "a", flat_config(), flat_tensors()))
    save_eagle3(head, tmp_path / "b", {"note": "kept"})
    again = load(tmp_path / "b")
    assert again.config == head.config
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor.to(torch.bfloat16).to(tensor.dtype)), name
    assert json.loads((tmp_path / "b" / "config.json").read_text())["note"] == "kept"
