"""The one thread of a process that does torch work: loading included, or the forwards pay for it."""

import os
from concurrent.futures import ThreadPoolExecutor

import torch

from .kernels.native import bind_threads


def torch_thread(num_threads: int, *, shared_processors: bool = False) -> ThreadPoolExecutor:
    """Return an executor of one thread whose parallel regions use `num_threads` threads.

    OpenMP keeps a pool for every thread that ever ran a parallel region. Once the pools together have more threads than
    there are processors, none of them waits actively any more: a forward of Gemma 3 270M on two processors took 13.9 ms
    instead of 9.5 after the model had been loaded on another thread. So everything runs here, from the first tensor on.

    `shared_processors` says that other processes of the cell compute on the same processors in turn. Where the pool is
    as large as the processors are many, each of its threads then stays on one of them. Left to itself the system often
    wakes two of them on one processor, and keeps them there for the whole forward: every second one took twice as long.
    """
    return ThreadPoolExecutor(1, "torch", initializer=_begin, initargs=(num_threads, shared_processors))


def _begin(num_threads: int, shared_processors: bool) -> None:
    torch.set_num_threads(num_threads)
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if shared_processors and 1 < len(cpus) == num_threads:
        bind_threads(cpus)
