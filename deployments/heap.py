"""The garbage collector of a process that serves."""

import gc


def freeze_heap() -> None:
    """Collect garbage, then leave what a started process holds out of every later collection.

    Libraries and model are some 400,000 objects that never go; to look through them stops all streams for 0.2 to 0.35 s
    each time.
    """
    gc.collect()
    gc.freeze()
