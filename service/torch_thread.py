"""The one thread of a process that does torch work: loading included, or the forwards pay for it."""

from concurrent.futures import ThreadPoolExecutor

import torch


def torch_thread(num_threads: int) -> ThreadPoolExecutor:
    """Return an executor of one thread whose parallel regions use `num_threads` threads.

    OpenMP keeps a pool for every thread that ever ran a parallel region. Once the pools together have more threads than
    there are processors, none of them waits actively any more: a forward of Gemma 3 270M on two processors took 13.9 ms
    instead of 9.5 after the model had been loaded on another thread. So everything runs here, from the first tensor on.
    """
    return ThreadPoolExecutor(1, "torch", initializer=torch.set_num_threads, initargs=(num_threads,))
