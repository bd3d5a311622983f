"""The one backend of this process, for an HTTP application that Ray builds before the backend exists."""

from typing import Any

from .backend import EngineBackend

_installed: list[EngineBackend] = []


def install(backend: EngineBackend) -> None:
    """Make `backend` the one that `CurrentBackend` speaks for."""
    _installed[:] = [backend]


class CurrentBackend:
    """Stands for the installed backend; not ready until there is one."""

    @property
    def ready(self) -> bool:
        """True when a backend is installed and ready."""
        return bool(_installed) and _installed[0].ready

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not _installed:
            raise AttributeError(name)
        return getattr(_installed[0], name)
