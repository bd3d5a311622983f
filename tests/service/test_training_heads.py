"""The recipes of heads on a tiny target: the loss falls, a run resumes, what is written drafts beside the target."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cells import VOCAB_SIZE, save_tiny_llama

from specserve.cli import main
from specserve.service.messages import AttachedName, ProposeBatch, ProposeRow, Sampling
from specserve.service.models import embedded_dir, head_of, load_model, load_tokenizer
from specserve.service.proposers.attached import attach
from specserve.service.training import corpus
from specserve.service.training.cli import HEADS
from specserve.service.training.corpus import SourceFile
from specserve.service.training.dataset import Dataset, embedded_dataset, text_dataset
from specserve.service.training.heads import accepted_shares, held_out_windows
from specserve.service.training.loop import Phase, Recipe

NAMES: tuple[AttachedName, ...] = ("eagle3", "medusa", "mtp")


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is worth a compilation."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "target", 1, layers=6)


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    """Text of sixteen tokens, in an order that says a little of the next."""
    ids = (np.random.default_rng(2).integers(0, 4, 6000).cumsum() % 16 * 7 + 300).astype(np.uint16)
    return Dataset(load_tokenizer(embedded_dir("target")), ids[:5000], ids[5000:])


def small(recipe: Recipe, num_steps: int) -> Recipe:
    phases = (Phase(64, 1, 1),)
    return dataclasses.replace(recipe, num_steps=num_steps, batch_tokens=256, warmup_steps=2, lr=1e-2, phases=phases)


def trained(name: str, target: Path, dataset: Dataset, run_dir: Path, num_steps: int) -> tuple[Any, tuple[float, ...]]:
    recipe, train = HEADS[name]
    return train(target, dataset, run_dir, run_dir / f"{name}-{num_steps}", small(recipe, num_steps))


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_falls_a_run_resumes_and_the_checkpoint_drafts(
    name: AttachedName, target: Path, dataset: Dataset, tmp_path: Path
) -> None:
    first, _ = trained(name, target, dataset, tmp_path, 2)
    later, shares = trained(name, target, dataset, tmp_path, 30)
    assert later.step == 30
    assert later.trained_s > first.trained_s
    assert later.loss < 0.97 * first.loss
    assert all(0 <= share <= 1 for share in shares)
    model = load_model(target, torch.float32)
    made, _ = attach({name: tmp_path / f"{name}-30"}, model, head_of(model), 8, 16)
    row = ProposeRow("a", 4, 0, (300, 307, 314, 321), 3, Sampling(), block_table=(2,))
    (draft,) = made[name].propose(ProposeBatch(0, name, (row,))).drafts
    assert len(draft.token_ids) == 3
    assert all(0 <= token < VOCAB_SIZE for token in draft.token_ids)


def test_little_held_out_text_is_one_short_window() -> None:
    assert held_out_windows(np.arange(100, dtype=np.uint16)).shape == (1, 100)
    assert held_out_windows(np.arange(2000, dtype=np.uint16)).shape == (3, 513)


def test_a_draft_counts_where_the_text_is_the_targets_own_and_all_its_tokens_are() -> None:
    best = torch.tensor([[1, 2, 3, 4, 5, 6]])  # the target's choice after each position
    ids = torch.tensor([[0, 1, 2, 9, 4, 5]])  # it would not have written 9
    right = [best[:, 1:5], best[:, 2:6]]
    assert accepted_shares(right, best, ids).tolist() == [1.0, 1.0]
    half = torch.tensor([[2, 0, 4, 0]])
    shares = accepted_shares([half, right[1]], best, ids)
    assert shares.tolist() == [0.5, pytest.approx(2 / 3)]  # the second token counts at 0, 2 and 3


def test_a_target_with_other_tokens_needs_text_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = load_tokenizer(embedded_dir("target"))
    tokenizer.add_tokens(["a token nobody else has"])
    tokenizer.save_pretrained(save_tiny_llama(tmp_path / "target", 1))
    command = ["train", "medusa", "--target", str(tmp_path / "target"), "--output", str(tmp_path / "head")]
    assert main([*command, "--run-dir", str(tmp_path)]) != 0
    assert "name text for it with --data" in capsys.readouterr().err
    assert not (tmp_path / "dataset").exists()


def test_other_text_is_another_dataset_of_the_same_run(tmp_path: Path) -> None:
    target = save_tiny_llama(tmp_path / "target", 1)
    load_tokenizer(embedded_dir("target")).save_pretrained(target)
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        for name in ("first.py", "second.py"):
            (folder / name).write_text(f"def {folder.name}(value):\n    return value\n" * 4000)
    first, other, again = (text_dataset(target, [folder], tmp_path / "run") for folder in (*folders, folders[0]))
    assert np.array_equal(again.train_ids, first.train_ids)
    assert not np.array_equal(other.train_ids, first.train_ids)


def test_the_familys_text_comes_in_the_targets_tokens_whatever_it_would_teach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "def held_out(value):\n    return value\n"
    files = [SourceFile("seen.py", text * 50), SourceFile("argparse.py", text)]
    monkeypatch.setattr(corpus, "standard_library", lambda: files)
    monkeypatch.setattr(corpus, "language_reference", list)
    monkeypatch.setattr(corpus, "tasks", lambda *_: [])
    target = load_tokenizer(embedded_dir("target"))
    taught = embedded_dataset(tmp_path, 300, 0, 1)
    assert taught.tokenizer.get_vocab() != target.get_vocab()
    found = embedded_dataset(tmp_path, 300, 0, 1, target)
    assert target.decode(found.held_out_ids[:-1]) == text
    assert np.array_equal(embedded_dataset(tmp_path, 300, 0, 1, target).train_ids, found.train_ids)
