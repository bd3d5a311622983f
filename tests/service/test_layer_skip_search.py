"""The search for layers to leave out: what it compares is what drafting accepts, and it finds what is worth most."""

import json
from pathlib import Path

import pytest
import torch
from support.cells import save_tiny_llama

from specserve.service.errors import BadRequestError
from specserve.service.models import embedded_dir, load_model, load_tokenizer
from specserve.service.skipping import NOTHING, Skip, read_skip
from specserve.service.training.layer_skip import OwnText, Rating, StepCosts, rate, search, tune_layer_skip

COSTS = StepCosts((10.0, 10.0, 10.0, 11.0), 1.0, 0.5)


def test_a_rating_is_the_best_length_of_tokens_for_time() -> None:
    rating = rate((0.9, 0.8, 0.1), Skip(frozenset({0, 1, 2, 3, 4}), frozenset({0, 1})), COSTS)
    assert rating.draft_cost == pytest.approx(0.4)
    assert (rating.gamma, rating.gain) == (2, pytest.approx(2.7 * 10 / (2 * 4 + 10)))


def test_the_search_is_seeded_and_finds_the_best_of_a_small_landscape() -> None:
    wanted = Skip(frozenset({1, 3}), frozenset({2}))

    def value(skip: Skip) -> Rating:
        wrong = len(skip.attention ^ wanted.attention) + len(skip.mlp ^ wanted.mlp)
        return Rating(2.0 - 0.1 * wrong, 1, 0.5, ())

    assert search(value, 5, 200, 7, progress=False)[0] == wanted
    assert search(value, 5, 9, 7, progress=False) == search(value, 5, 9, 7, progress=False)


def test_a_draft_that_leaves_nothing_out_agrees_with_the_targets_own_text(tmp_path: Path) -> None:
    """Also after another choice wrote its rows: every draft has a page of its own, and the text's pages stay."""
    model = load_model(save_tiny_llama(tmp_path, 1, layers=4), torch.float64)
    own = OwnText(model, [[(7 * place + shift) % 90 + 3 for place in range(48)] for shift in (0, 5)])
    assert own.survival(NOTHING) == (1.0,) * 6
    disturbed = own.survival(Skip(frozenset({0, 1}), frozenset({2})))
    assert disturbed[0] < 1.0
    assert list(disturbed) == sorted(disturbed, reverse=True)
    assert own.survival(NOTHING) == (1.0,) * 6


def test_the_file_it_writes_is_what_the_setting_reads(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "target", 1, layers=4)
    load_tokenizer(embedded_dir("target")).save_pretrained(tmp_path / "target")
    text = tmp_path / "text.py"
    text.write_text(Path(__file__).read_text())
    output = tmp_path / "found" / "layer_skip.json"
    rating = tune_layer_skip(tmp_path / "target", [text], output, 12)
    read_skip(output).checked(4)
    assert json.loads(output.read_text())["measured"]["gamma"] == rating.gamma
    text.write_text("short")
    with pytest.raises(BadRequestError, match="no text of 48 tokens"):
        tune_layer_skip(tmp_path / "target", [text], output, 12)
