"""GGUF files: a tiny Qwen2 with the embedded tokenizer, written as llama.cpp's converter would, and headers alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from specserve.service import gguf, sources
from specserve.service.cache import cache_dir
from specserve.service.errors import ModelUnsupportedError
from specserve.service.models import embedded_dir, load_model, load_tokenizer, read_shape

writing = pytest.importorskip("gguf")
pytest.importorskip("accelerate")


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.fixture
def path(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECSERVE_CACHE", str(tmp_path / "cache"))
    return write_gguf(model, tmp_path / "tiny.gguf")


def test_a_file_is_converted_once_to_the_same_model_and_tokenizer(
    model: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_shape(str(path)).max_positions == 256
    monkeypatch.setattr(sources, "convert", lambda *_: pytest.fail("converted again"))
    loaded = load_model(str(path), torch.bfloat16)
    expected = model.model.state_dict()
    for name, tensor in loaded.trunk.state_dict().items():
        assert torch.equal(tensor, expected[name].bfloat16()), name
    assert torch.equal(loaded.head.weight, model.lm_head.weight.bfloat16())
    text = "def add(first, second):\n    return first + second  # été\n"
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.get_vocab() == load_tokenizer(embedded_dir("target")).get_vocab()
    assert [folder.name[:5] for folder in cache_dir("models").iterdir()] == ["tiny-"]


def test_a_conversion_that_fails_leaves_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no tokenizer in it")

    monkeypatch.setattr(gguf.AutoTokenizer, "from_pretrained", fail)
    with pytest.raises(ModelUnsupportedError, match="no tokenizer in it"):
        read_shape(str(path))
    assert list(cache_dir("models").iterdir()) == []


def test_a_file_without_its_packages_names_the_extra(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelUnsupportedError, match=r"pip install 'specserve\[gguf\]'"):
        read_shape(str(path))


@pytest.mark.parametrize(
    ("architecture", "fields", "reason"),
    [
        ("mamba", {}, "running state"),
        ("rwkv6", {}, "running state"),
        ("t5", {}, "encoder-decoder"),
        ("nomic-bert", {}, "encoder"),
        ("gemma3", {"gemma3.rope.scaling.type": "linear"}, "scales its rotary positions"),
    ],
)
def test_a_gguf_file_is_refused_from_its_header(
    tmp_path: Path, architecture: str, fields: dict[str, str], reason: str
) -> None:
    path = tmp_path / "model.gguf"
    write_header(path, architecture, fields)
    with pytest.raises(ModelUnsupportedError, match=rf"{architecture}.*{reason}"):
        read_shape(str(path))


@pytest.mark.parametrize("content", [b"", b"GGUF", b"PK\x03\x04" + bytes(40), b"GGUF\x03\0\0\0" + b"\1" * 30])
def test_a_damaged_gguf_file_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelUnsupportedError, match=r"model\.gguf"):
        read_shape(str(path))


def write_header(path: Path, architecture: str, fields: dict[str, str]) -> None:
    writer = writing.GGUFWriter(path, architecture)
    for name, value in fields.items():
        writer.add_string(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def write_gguf(model: Any, path: Path) -> Path:
    """Write `model`, a Qwen2, with the embedded tokenizer to `path`."""
    writer = writing.GGUFWriter(path, "qwen2")
    config = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    bpe = json.loads((embedded_dir("target") / "tokenizer.json").read_text())["model"]
    tokenizer = AutoTokenizer.from_pretrained(embedded_dir("target"))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokenizer.convert_ids_to_tokens(range(config.vocab_size)))
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges([" ".join(pair) for pair in bpe["merges"]])
    writer.add_eos_token_id(0)
    parts = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for name, tensor in model.state_dict().items():
        short = name.removeprefix("model.").replace("layers.", "blk.")
        short = short.replace("embed_tokens", "token_embd").replace("lm_head", "output")
        short = "output_norm.weight" if short == "norm.weight" else short
        for theirs, ours in parts.items():
            short = short.replace(theirs, ours)
        writer.add_tensor(short, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
