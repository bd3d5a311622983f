"""Where the project keeps what it can make again: converted models and compiled kernels."""

import os
from pathlib import Path


def cache_dir(kind: str) -> Path:
    """Return the folder of one kind of cached files: `$SPECSERVE_CACHE/<kind>`, else `~/.cache/specserve/<kind>`."""
    root = os.environ.get("SPECSERVE_CACHE")
    return (Path(root).expanduser() if root else Path.home() / ".cache" / "specserve") / kind
