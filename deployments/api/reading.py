"""Long texts are tokenized beside the event loop, so that running streams go on meanwhile."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

LONG_CHARS = 4096
"""Shorter texts take less than 5 ms; the longest that a model may be sent took 770 ms (embedded) on the loop, and holds
it up for 15 ms (Gemma 3: 43 ms) from the thread, where lists of tokens are made."""

_reader = ThreadPoolExecutor(1, "tokenize")
T = TypeVar("T")


async def read(num_chars: int, work: Callable[[], T]) -> T:
    """Return what `work` makes of so many characters. Long texts wait for each other.

    A tokenizer may be used by several threads as long as nobody changes its options, which `load_tokenizer` sets.
    """
    if num_chars < LONG_CHARS:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_reader, work)
