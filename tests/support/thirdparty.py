"""Third parties in environments of their own, and the service that they talk to."""

import os
import subprocess
from pathlib import Path

import httpx
import pytest

from .scrape import Samples

ROOT = Path(__file__).parent.parent.parent
TIMEOUT_S = 300


class Environment:
    """A third party's own environment; `run` runs one of its commands."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.packages = next(folder.glob("lib/python*/site-packages"))

    def run(self, *command: str, cwd: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
        """Return what the command said; `cwd` is its home too, and it is stopped after five minutes."""
        kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ} | {"HOME": str(cwd)}
        return subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=cwd,
            env={**kept, **variables},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )


def environment(name: str) -> Environment:
    """Return the environment that `make conformance` made of `NAME.txt`."""
    folder = ROOT / ".conformance" / name
    if not (folder / "bin").exists():
        pytest.skip(f"make conformance makes the environment {name}")
    return Environment(folder)


def scraped(url: str) -> Samples:
    """Return what the service's `/metrics` says now."""
    return Samples(httpx.get(f"{url}/metrics").raise_for_status().text)
