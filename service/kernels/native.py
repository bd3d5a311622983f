"""The kernels as Python calls: compiled once for this processor, kept on disk, loaded by ctypes.

They share torch's OpenMP threads, since both load the same `libgomp.so.1`. Nothing here allocates tensors.
"""

import ctypes
import functools
import hashlib
import logging
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from ..cache import cache_dir

LOG = logging.getLogger(__name__)
FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared",
    "-Wno-psabi",
)  # fmt: skip
DTYPES = {torch.bfloat16: 0, torch.float32: 1, torch.float64: 2}
BLOCK_SLOTS = 16
"""Token slots of one KV block: keys lie in lanes of this many."""

_INT, _LONG, _DOUBLE, _POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
_SIGNATURES = {
    "specserve_add_norm": [_INT, *[_POINTER] * 5, _LONG, _LONG, _DOUBLE, _INT],
    "specserve_rope_write": [_INT, *[_POINTER] * 10, *[_LONG] * 5, _DOUBLE, _INT, _INT],
    "specserve_attend": [_INT, *[_POINTER] * 10, *[_LONG] * 5, _DOUBLE, _DOUBLE],
    "specserve_move_slots": [_INT, *[_POINTER] * 4, *[_LONG] * 3],
    "specserve_product": [_INT, *[_POINTER] * 4, _LONG, _LONG, _LONG],
    "specserve_product_int8": [_INT, *[_POINTER] * 5, _LONG, _LONG, _LONG],
    "specserve_gated": [_INT, _POINTER, _POINTER, _LONG, _LONG, _INT],
    "specserve_gumbel_argmax": [_INT, _POINTER, _POINTER, _POINTER, _LONG, _LONG],
    "specserve_bind_threads": [_POINTER, _LONG],
    "specserve_argmax": [_INT, _POINTER, _POINTER, _LONG, _LONG],
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernels, or None (with a warning) where they cannot be built. Cost: seconds, the first time.

    The build is kept under `$SPECSERVE_CACHE` or `~/.cache/specserve`, named by source, compiler and processor.
    """
    compiler = next((found for name in ("g++", "c++", "clang++") if (found := shutil.which(name))), None)
    if compiler is None:
        LOG.warning("no C++ compiler was found: the model runs without the fused kernels, several times slower")
        return None
    try:
        loaded = ctypes.CDLL(str(_built(compiler)))
    except (OSError, subprocess.CalledProcessError) as error:
        detail = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
        LOG.warning("the fused kernels could not be built, so the model runs several times slower: %s", detail)
        return None
    for name, arguments in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes = arguments
        function.restype = None
    return loaded


def _built(compiler: str) -> Path:
    source = Path(__file__).with_name("kernels.cpp")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    mark = hashlib.sha256("\0".join((source.read_text(), version, *FLAGS, _processor())).encode()).hexdigest()[:16]
    place = cache_dir("kernels") / f"kernels-{mark}.so"
    if place.exists():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        made = Path(folder) / place.name
        subprocess.run([compiler, *FLAGS, str(source), "-o", str(made)], capture_output=True, text=True, check=True)
        made.replace(place)
    return place


def _processor() -> str:
    """Return what tells this processor's instructions from another's."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line for line in lines if line.startswith(("flags", "Features"))), "unknown")


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Return the address of a contiguous tensor's first element; None stays None."""
    assert tensor is None or tensor.is_contiguous()
    return None if tensor is None else tensor.data_ptr()


def argmax(logits: torch.Tensor) -> list[int]:
    """Return the lowest index of each row's largest value; `logits` [rows, vocab] bf16, float32 or float64."""
    native = library()
    if native is None or not logits.is_contiguous() or logits.device.type != "cpu":
        return [int(token) for token in logits.argmax(-1).tolist()]
    out = torch.empty(logits.shape[0], dtype=torch.int64)
    native.specserve_argmax(DTYPES[logits.dtype], logits.data_ptr(), out.data_ptr(), logits.shape[0], logits.shape[1])
    return [int(token) for token in out.tolist()]


def bind_threads(cpus: list[int]) -> None:
    """Keep thread i of the calling thread's OpenMP pool on processor `cpus[i]`."""
    native = library()
    if native is not None:
        native.specserve_bind_threads((_LONG * len(cpus))(*cpus), len(cpus))
