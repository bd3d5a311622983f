"""Tokens per round on text the embedded models have never seen: what the model card states."""

import random
from collections.abc import Sequence
from pathlib import Path

from . import corpus
from .chat import chat_text


def held_out_code_prompts(count: int, seed: int = 0) -> list[str]:
    """Return the first halves of `count` held-out functions."""
    chosen = _functions(seed)[:count]
    return [function.code[: len(function.code) // 2] for function in chosen]


def held_out_rename_prompts(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Return `count` chat prompts that ask for a held-out function with one name changed, and the right answers."""
    prompts: list[tuple[str, str]] = []
    for function in _functions(seed):
        names = corpus.identifiers(function.code)
        if not names or len(prompts) == count:
            continue
        fenced = f"```python\n{function.code}\n```"
        answer = f"```python\n{corpus.renamed(function.code, names[0], 'replacement')}\n```"
        text = chat_text(f"Repeat this function with the name `{names[0]}` changed to `replacement`:\n{fenced}", answer)
        prompts.append((text[: text.index(answer, text.index("<|assistant|>"))], answer))
    return prompts


def training_code() -> list[str]:
    """Return functions of the standard library that are not held out."""
    files = [file for file in corpus.standard_library() if not file.held_out]
    return [
        function.code for file in files[::8] for function in corpus.functions(file, 900) if len(function.code) > 300
    ]


def _functions(seed: int) -> list[corpus.Function]:
    files: Sequence[corpus.SourceFile] = [
        file for file in corpus.standard_library() if file.held_out and not Path(file.name).name.startswith("test_")
    ]
    found = [function for file in files for function in corpus.functions(file, 900) if len(function.code) > 300]
    random.Random(seed).shuffle(found)
    return found
