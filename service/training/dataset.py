"""From corpus to token arrays, cached in the run's folder so that a resumed run trains on the same bytes."""

import hashlib
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from ..errors import BadRequestError
from ..models import load_tokenizer
from . import corpus
from .chat import END_OF_TEXT
from .loop import TokenIds
from .vocabulary import train_tokenizer

MIN_TRAIN_TOKENS = 20_000


@dataclass(frozen=True, slots=True)
class Dataset:
    """The tokenizer and the two token streams made with it; uint32 where the vocabulary needs it."""

    tokenizer: PreTrainedTokenizerFast
    train_ids: TokenIds
    held_out_ids: TokenIds


def embedded_dataset(
    run_dir: Path, vocab_size: int, num_tasks: int, seed: int, target: PreTrainedTokenizerFast | None = None
) -> Dataset:
    """Return the embedded family's data, building it (about two minutes) unless `run_dir` already holds it.

    In the tokens of the `target` to train for; without one, in those that its text teaches, which are others with
    another Python.
    """
    folder = run_dir / "dataset"
    if (folder / "train.npy").exists():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        if target is None or target.get_vocab() == tokenizer.get_vocab():
            return Dataset(tokenizer, np.load(folder / "train.npy"), np.load(folder / "held_out.npy"))
    files = corpus.standard_library() + corpus.language_reference()
    seen = [file for file in files if not file.held_out]
    documents = [file.text for file in seen]
    documents += corpus.tasks([file for file in seen if file.name.endswith(".py")], num_tasks, seed)
    random.Random(seed).shuffle(documents)
    tokenizer = target or train_tokenizer(documents, vocab_size)
    train_ids = encode(tokenizer, documents)
    held_out_ids = encode(tokenizer, [file.text for file in files if file.held_out])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    np.save(folder / "held_out.npy", held_out_ids)
    np.save(folder / "train.npy", train_ids)
    return Dataset(tokenizer, train_ids, held_out_ids)


def text_dataset(model_dir: Path, paths: list[Path], run_dir: Path) -> Dataset:
    """Return a user's own text in a model's tokens; every twentieth document is held out.

    Raises: BadRequestError when there is no text, or too little of it.
    """
    tokenizer = load_tokenizer(model_dir)
    documents = read_documents(paths)
    made_of = "\0".join([tokenizer.backend_tokenizer.to_str(), *documents])
    folder = run_dir / f"dataset-{hashlib.sha256(made_of.encode()).hexdigest()[:12]}"
    if not (folder / "train.npy").exists():
        random.Random(0).shuffle(documents)
        held_out = documents[::20]
        train_ids = encode(tokenizer, [text for place, text in enumerate(documents) if place % 20])
        if len(train_ids) < MIN_TRAIN_TOKENS:
            named = ", ".join(map(str, paths))
            raise BadRequestError(f"{named}: {len(train_ids)} tokens of text; {MIN_TRAIN_TOKENS} are the least", "data")
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / "held_out.npy", encode(tokenizer, held_out))
        np.save(folder / "train.npy", train_ids)
    return Dataset(tokenizer, np.load(folder / "train.npy"), np.load(folder / "held_out.npy"))


def read_documents(paths: list[Path]) -> list[str]:
    """Return the texts of files and folders. Raises: BadRequestError for a path that is not there."""
    return [text for path in paths for text in _documents(path)]


def _documents(path: Path) -> list[str]:
    """Return the text of a file, or of every file under a folder that is text."""
    if not path.exists():
        raise BadRequestError(f"there is no {path}", "data")
    texts = []
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            try:
                texts.append(file.read_text("utf-8"))
            except UnicodeDecodeError:
                continue
    return [text for text in texts if text.strip()]


def encode(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> TokenIds:
    """Return all documents as one array of ids, each closed by the end-of-text token."""
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    end = int(str(end))
    ids: list[int] = []
    for start in tqdm(range(0, len(documents), 500), desc="tokenize", unit="batch", mininterval=2.0):
        encoded = tokenizer(documents[start : start + 500], add_special_tokens=False)["input_ids"]
        for row in encoded:
            ids.extend([*row, end])
    return np.array(ids, np.uint16) if len(tokenizer) <= 65_536 else np.array(ids, np.uint32)
