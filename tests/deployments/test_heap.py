"""A started process leaves what it holds out of garbage collection."""

import subprocess
import sys

CODE = """
import gc
from specserve.deployments.heap import freeze_heap

class Ring:
    def __init__(self): self.itself = self

kept = [Ring() for _ in range(1000)]
garbage = Ring(); del garbage
freeze_heap()
assert gc.get_freeze_count() > 1000
assert not any(isinstance(thing, Ring) for thing in gc.get_objects())
later = Ring(); del later
assert gc.collect() >= 1, "what comes later is still collected"
"""


def test_what_is_there_is_frozen_and_what_comes_later_is_collected() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=60)
