"""Reads `/metrics` the way a test wants to ask it."""

from collections.abc import Iterator

import httpx
from prometheus_client.parser import text_string_to_metric_families


class Samples:
    """Every sample of one scrape."""

    def __init__(self, text: str) -> None:
        families = text_string_to_metric_families(text)
        self._samples = [sample for family in families for sample in family.samples]

    def of(self, name: str) -> Iterator[tuple[dict[str, str], float]]:
        """Yield the labels and values of one name."""
        for sample in self._samples:
            if sample.name == name:
                yield sample.labels, sample.value

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of a name that have these labels; there must be one."""
        found = [value for has, value in self.of(name) if labels.items() <= has.items()]
        assert found, f"no {name} with {labels}"
        return sum(found)

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of a name that have these labels, 0 when there is none."""
        return sum(value for has, value in self.of(name) if labels.items() <= has.items())


async def scrape(client: httpx.AsyncClient) -> Samples:
    """Return what `/metrics` says now."""
    response = await client.get("/metrics")
    assert response.status_code == 200
    return Samples(response.text)
