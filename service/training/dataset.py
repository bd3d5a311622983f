"""From corpus to token arrays, cached in the run's folder so that a resumed run trains on the same bytes."""

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from . import corpus
from .chat import END_OF_TEXT
from .vocabulary import train_tokenizer


@dataclass(frozen=True, slots=True)
class Dataset:
    """The tokenizer and the two token streams made with it."""

    tokenizer: PreTrainedTokenizerFast
    train_ids: npt.NDArray[np.uint16]
    held_out_ids: npt.NDArray[np.uint16]


def embedded_dataset(run_dir: Path, vocab_size: int, num_tasks: int, seed: int) -> Dataset:
    """Return the embedded family's data, building it (about two minutes) unless `run_dir` already holds it."""
    folder = run_dir / "dataset"
    if (folder / "train.npy").exists():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        return Dataset(tokenizer, np.load(folder / "train.npy"), np.load(folder / "held_out.npy"))
    files = corpus.standard_library() + corpus.language_reference()
    seen = [file for file in files if not file.held_out]
    documents = [file.text for file in seen]
    documents += corpus.tasks([file for file in seen if file.name.endswith(".py")], num_tasks, seed)
    random.Random(seed).shuffle(documents)
    tokenizer = train_tokenizer(documents, vocab_size)
    train_ids = encode(tokenizer, documents)
    held_out_ids = encode(tokenizer, [file.text for file in files if file.held_out])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    np.save(folder / "held_out.npy", held_out_ids)
    np.save(folder / "train.npy", train_ids)
    return Dataset(tokenizer, train_ids, held_out_ids)


def encode(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> npt.NDArray[np.uint16]:
    """Return all documents as one array of ids, each closed by the end-of-text token."""
    end = int(str(tokenizer.convert_tokens_to_ids(END_OF_TEXT)))
    ids: list[int] = []
    for start in tqdm(range(0, len(documents), 500), desc="tokenize", unit="batch", mininterval=2.0):
        encoded = tokenizer(documents[start : start + 500], add_special_tokens=False)["input_ids"]
        for row in encoded:
            ids.extend([*row, end])
    return np.array(ids, dtype=np.uint16)
