"""The training text: CPython's standard library, its language reference, and tasks made from its functions.

Owns what is trained on and what is held out. Whole modules are held out together with their tests, so that numbers
measured on held-out text say something about code the models have never seen.
"""

import ast
import io
import keyword
import random
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .chat import chat_text

HELD_OUT_MODULES = frozenset(
    {
        "argparse",
        "calendar",
        "colorsys",
        "csv",
        "fractions",
        "graphlib",
        "heapq",
        "ipaddress",
        "netrc",
        "pprint",
        "sched",
        "shelve",
        "statistics",
        "textwrap",
        "tomllib",
        "zipapp",
    }
)
"""Modules never trained on, nor their tests."""

MAX_FILE_CHARS = 300_000
SKIPPED_FOLDERS = frozenset({"site-packages", "__pycache__", "encodings", "_bundled", "bad_coding", "lib2to3"})


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of the corpus; `name` is its path relative to the standard library."""

    name: str
    text: str

    @property
    def held_out(self) -> bool:
        """True when the file belongs to a held-out module or to its tests."""
        stems = {part.removesuffix(".py").removeprefix("test_") for part in Path(self.name).parts}
        return not stems.isdisjoint(HELD_OUT_MODULES)


@dataclass(frozen=True, slots=True)
class Function:
    """One function taken out of a source file, dedented; `doc` is its docstring's first paragraph ('' if none)."""

    module: str
    name: str
    code: str
    doc: str


def standard_library() -> list[SourceFile]:
    """Return every Python file of the interpreter's standard library that decodes and parses, sorted by name."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not SKIPPED_FOLDERS.isdisjoint(relative.parts):
            continue
        try:
            text = path.read_text("utf-8")
            ast.parse(text)
        except (UnicodeDecodeError, SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        if 200 < len(text) < MAX_FILE_CHARS:
            files.append(SourceFile(str(relative), text))
    return files


def language_reference() -> list[SourceFile]:
    """Return the language reference's topics that CPython ships for `help()`, one document each."""
    from pydoc_data.topics import topics

    return [SourceFile(f"topics/{name}.rst", text) for name, text in sorted(topics.items()) if len(text) > 200]


def functions(file: SourceFile, max_chars: int = 1600) -> Iterator[Function]:
    """Yield the functions and methods of `file` that are between 80 and `max_chars` characters long."""
    lines = file.text.splitlines(keepends=True)
    module = file.name.removesuffix(".py").replace("/__init__", "").replace("/", ".")
    for node in ast.walk(ast.parse(file.text)):
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
            continue
        block = lines[node.lineno - 1 : node.end_lineno]
        code = _dedent("".join(block), node.col_offset)
        if not 80 <= len(code) <= max_chars:
            continue
        doc = (ast.get_docstring(node) or "").split("\n\n")[0]
        yield Function(module, node.name, code.rstrip("\n"), " ".join(doc.split()))


def _dedent(code: str, columns: int) -> str:
    prefix = " " * columns
    return "".join(line.removeprefix(prefix) for line in code.splitlines(keepends=True))


def identifiers(code: str) -> list[str]:
    """Return the distinct identifiers of `code` longer than two characters, in order of appearance."""
    names: dict[str, None] = {}
    try:
        for token in tokenize.generate_tokens(io.StringIO(code).readline):
            if token.type == tokenize.NAME and len(token.string) > 2 and not keyword.iskeyword(token.string):
                names.setdefault(token.string)
    except (tokenize.TokenError, IndentationError, SyntaxError):
        return []
    names.pop("self", None)
    return list(names)


def renamed(code: str, old: str, new: str) -> str:
    """Return `code` with every identifier token `old` spelled `new`; strings and comments stay as they are."""
    pieces: list[str] = []
    lines = code.splitlines(keepends=True)
    position = (1, 0)
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type != tokenize.NAME or token.string != old:
            continue
        pieces.append(_between(lines, position, token.start))
        pieces.append(new)
        position = token.end
    pieces.append(_between(lines, position, (len(lines) + 1, 0)))
    return "".join(pieces)


def _between(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    if start[0] == end[0]:
        return lines[start[0] - 1][start[1] : end[1]]
    middle = "".join(lines[start[0] : end[0] - 1])
    last = lines[end[0] - 1][: end[1]] if end[0] <= len(lines) else ""
    return lines[start[0] - 1][start[1] :] + middle + last


TaskKind = Literal["rename", "repeat", "write", "describe", "explain"]


def task(function: Function, kind: TaskKind, new_name: str, rng: random.Random) -> str | None:
    """Return one chat document made from `function`, or None when the function does not suit the task.

    `rename` and `repeat` teach copying (what prompt lookup feeds on), the others make a chat answer look like one.
    """
    fenced = f"```python\n{function.code}\n```"
    if kind == "rename":
        names = identifiers(function.code)
        if not names:
            return None
        old = function.name if rng.random() < 0.5 and function.name in names else rng.choice(names)
        answer = f"```python\n{renamed(function.code, old, new_name)}\n```"
        ask = rng.choice(
            [
                f"Repeat this function with the name `{old}` changed to `{new_name}`:\n{fenced}",
                f"Rename `{old}` to `{new_name}` in this code:\n{fenced}",
                f"{fenced}\nChange the name `{old}` to `{new_name}`.",
            ]
        )
        return chat_text(ask, answer)
    if kind == "repeat":
        ask = rng.choice(["Repeat this function:", "Copy this code exactly:", "Print this function again:"])
        return chat_text(f"{ask}\n{fenced}", fenced)
    if not function.doc:
        return None
    if kind == "write":
        verb = rng.choice(["Write", "Implement", "Give me"])
        return chat_text(f"{verb} a Python function `{function.name}`: {function.doc}", fenced)
    if kind == "describe":
        return chat_text(f"What does `{function.name}` in `{function.module}` do?", function.doc)
    return chat_text(f"Explain this function in one sentence:\n{fenced}", function.doc)


def tasks(files: list[SourceFile], count: int, seed: int) -> list[str]:
    """Return `count` chat documents made from the functions of `files`; the same for the same arguments."""
    rng = random.Random(seed)
    pool = [function for file in files for function in functions(file)]
    documented = [function for function in pool if function.doc]
    names = sorted({name for function in pool for name in identifiers(function.code)})
    kinds: list[TaskKind] = ["rename", "repeat", "write", "describe", "explain"]
    documents: list[str] = []
    while len(documents) < count:
        kind = rng.choices(kinds, weights=[45, 15, 15, 10, 15])[0]
        function = rng.choice(pool if kind in ("rename", "repeat") else documented)
        try:
            document = task(function, kind, rng.choice(names), rng)
        except (tokenize.TokenError, IndentationError, SyntaxError):
            continue
        if document is not None:
            documents.append(document)
    return documents
