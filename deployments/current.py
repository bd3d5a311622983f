"""The one backend and gate of this process, for an HTTP application that Ray builds before they exist."""

from typing import Any

from starlette.exceptions import HTTPException

from .api.gate import Gatekeeper
from .backend import EngineBackend

_installed: list[tuple[EngineBackend, Gatekeeper]] = []


def install(backend: EngineBackend, gate: Gatekeeper) -> None:
    """Make `backend` the one that `CurrentBackend` speaks for, and `gate` that of `CurrentGate`."""
    _installed[:] = [(backend, gate)]


class CurrentBackend:
    """Stands for the installed backend; not ready until there is one."""

    @property
    def ready(self) -> bool:
        """True when a backend is installed and ready."""
        return bool(_installed) and _installed[0][0].ready

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not _installed:
            raise AttributeError(name)
        return getattr(_installed[0][0], name)


class CurrentGate:
    """Stands for the installed gate; nobody is let in until there is one."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if not _installed:
            raise HTTPException(503, "the model is not ready")
        return getattr(_installed[0][1], name)
