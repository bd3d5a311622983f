"""The fused layers against transformers' own modules, for every family that has them."""

from pathlib import Path

import pytest
import torch
from support.architectures import CONFIGS, loaded
from transformers import GPT2Config

from specserve.service.features import FeaturePages
from specserve.service.kernels.native import library
from specserve.service.messages import ScoreRow
from specserve.service.paged_model import PagedModel
from specserve.service.skipping import Skip, whole_layers

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler here")


def rows(start: int, first: list[int], second: list[int]) -> list[ScoreRow]:
    return [
        ScoreRow("a", start, tuple(first), len(first), (3, 0, 5, 9)),
        ScoreRow("b", start, tuple(second), 1, (1, 2, 7, 4)),
    ]


@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_fused_layers_leave_out_what_the_modules_do(name: str, tmp_path: Path) -> None:
    """The context is the whole model's, as when a target drafts for itself."""
    model = loaded(tmp_path, CONFIGS[name], torch.float64)
    skips = (
        Skip(frozenset({0, 2}), frozenset({1})),
        Skip(mlp=frozenset({0, 2})),
        whole_layers([1]),
        whole_layers([0, 2]),
    )
    for skip in skips:
        fused, modules = (PagedModel(model, 12, 16, fused=kind) for kind in (True, False))
        assert fused.is_fused
        for paged in (fused, modules):
            paged.forward(rows(0, list(range(5, 35)), list(range(3, 33))))
        ours, theirs = (paged.forward(rows(30, [7, 8], [9, 4]), skip=skip) for paged in (fused, modules))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        whole = modules.forward(rows(30, [7, 8], [9, 4]))
        assert (whole - theirs).norm() > 0.1


@pytest.mark.parametrize("name", CONFIGS)
def test_fused_layers_are_the_modules(name: str, tmp_path: Path) -> None:
    model = loaded(tmp_path, CONFIGS[name], torch.float64)
    fused, modules = PagedModel(model, 10, 16), PagedModel(model, 10, 16, fused=False)
    assert fused.is_fused
    assert not modules.is_fused
    first, second = [5 * place % 290 + 3 for place in range(40)], [7 * place % 280 + 9 for place in range(33)]
    kept = [FeaturePages((0, 1, 3), CONFIGS[name].hidden_size, 10, 16, model.head.weight) for _ in range(2)]
    for batch in (rows(0, first, second), rows(40, [9, 8, 7], [6]), rows(38, [11, 12], [13, 14])):
        mine, theirs = (paged.forward(batch, pages) for paged, pages in zip((fused, modules), kept, strict=True))
        # The modules compute norms in float32 whatever the dtype.
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-4)
    my_states, their_states = (pages.read((3, 0, 5, 9), range(43), (0, 1, 3)) for pages in kept)
    assert my_states.abs().sum(-1).min() > 0
    assert torch.allclose(my_states, their_states, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_bf16_rows_are_the_same_bits_alone_and_together(name: str, tmp_path: Path) -> None:
    model = PagedModel(loaded(tmp_path, CONFIGS[name], torch.bfloat16), 10, 16)
    tokens = [5 * place % 290 + 3 for place in range(50)]
    together = model.forward(rows(0, tokens, tokens[:33]))[:50]
    one_by_one = [model.forward([ScoreRow("a", at, (token,), 1, (3, 0, 5, 9))]) for at, token in enumerate(tokens)]
    assert torch.equal(torch.cat(one_by_one), together)


def test_a_family_of_another_form_runs_through_its_modules(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    assert not PagedModel(loaded(tmp_path, config, torch.float64), 8, 16).is_fused


def test_a_page_that_is_no_whole_number_of_blocks_runs_through_the_modules(tmp_path: Path) -> None:
    assert not PagedModel(loaded(tmp_path, CONFIGS["llama"], torch.float64), 16, 8).is_fused


def test_layers_that_disagree_with_their_modules_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = loaded(tmp_path, CONFIGS["llama"], torch.float64)
    monkeypatch.setitem(__import__("specserve.service.fused_trunk", fromlist=["x"]).NORM_MODES, "llama", 1)
    assert not PagedModel(model, 8, 16).is_fused
    assert "apart from the modules" in caplog.text
