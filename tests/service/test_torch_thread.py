"""The one torch thread: where its pool may run."""

import os
from collections import Counter

import pytest
import torch

from specserve.service.kernels.native import library
from specserve.service.torch_thread import torch_thread

PROCESSORS = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def places(shared_processors: bool) -> tuple[set[int], Counter[int]]:
    """Return where the torch thread may run, and how many threads of this process are bound to each processor."""
    executor = torch_thread(len(PROCESSORS), shared_processors=shared_processors)
    executor.submit(lambda: torch.ones(512, 512) @ torch.ones(512, 512)).result()
    own = executor.submit(os.sched_getaffinity, 0).result()
    everyone = [os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")]
    executor.shutdown()
    return own, Counter(next(iter(mask)) for mask in everyone if len(mask) == 1)


@pytest.mark.skipif(len(PROCESSORS) < 2, reason="one processor is no choice")
@pytest.mark.skipif(library() is None, reason="needs the kernels")
def test_threads_that_share_processors_with_other_processes_stay_on_one_each() -> None:
    free, bound = places(shared_processors=False)
    assert free == set(PROCESSORS)
    assert not bound
    own, bound = places(shared_processors=True)
    assert own == {PROCESSORS[0]}
    assert bound == {cpu: 1 for cpu in PROCESSORS}
