"""A service that the cluster tests talk to."""

from dataclasses import dataclass

from specserve.deployments.settings import ServiceSettings


@dataclass(frozen=True)
class Service:
    """A running service: its address and a handle to ask the engine for process ids and counters."""

    url: str
    settings: ServiceSettings
    handle: object

    def pids(self) -> dict[str, int]:
        return self.handle.pids.remote().result(timeout_s=60)  # type: ignore[attr-defined, no-any-return]

    def report(self) -> dict[str, object]:
        return self.handle.report.remote().result(timeout_s=60)  # type: ignore[attr-defined, no-any-return]
