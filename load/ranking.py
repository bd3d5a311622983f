"""Each proposer at the draft length that suits it best, one line a proposer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .cells import Cell

Place = tuple[int, str]
"""A concurrency and a workload."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A proposer (None: plain decoding), its fastest cell in every place, and the memory it takes beside plain's."""

    proposer: str | None
    fastest: dict[Place, Cell]
    extra_mb: float | None

    def as_json(self) -> dict[str, Any]:
        """Return the proposer as the `--json` report holds it."""
        keys = ("tokens_per_s", "tokens_per_round", "draft_efficiency")
        return {
            "proposer": self.proposer,
            "extra_mb": self.extra_mb,
            "fastest": [
                {
                    "workload": workload,
                    "concurrency": concurrency,
                    "mode": cell.mode,
                    "ratio_to_plain": cell.ratios.to_plain,
                    **{key: getattr(cell.figures, key) for key in keys},
                }
                for (concurrency, workload), cell in self.fastest.items()
            ],
        }


def standings(cells: Sequence[Cell]) -> list[Standing]:
    """Return plain decoding and every proposer, in the cells' order."""
    by_proposer: dict[str | None, list[Cell]] = {}
    for cell in cells:
        by_proposer.setdefault(cell.proposer, []).append(cell)
    plain_mb = _most_mb(by_proposer.get(None, []))
    found = []
    for proposer, own in by_proposer.items():
        fastest: dict[Place, Cell] = {}
        for cell in own:
            place = (cell.concurrency, cell.workload)
            if place not in fastest or cell.figures.tokens_per_s > fastest[place].figures.tokens_per_s:
                fastest[place] = cell
        own_mb = _most_mb(own)
        extra_mb = None if proposer is None or own_mb is None or plain_mb is None else own_mb - plain_mb
        found.append(Standing(proposer, fastest, extra_mb))
    return found


def _most_mb(cells: Sequence[Cell]) -> float | None:
    return max((cell.figures.rss_mb for cell in cells if cell.figures.rss_mb is not None), default=None)


def ranking(cells: Sequence[Cell]) -> str:
    """Return the standings as a markdown table: a line a proposer, a column a workload and concurrency."""
    places = list(dict.fromkeys((cell.concurrency, cell.workload) for cell in cells))
    head = ("proposer", "MB", *(f"{workload.replace('_', '-')}, {level} at once" for level, workload in places))
    rows = [
        (one.proposer or "plain", _mb(one), *(_shown(one.fastest.get(place)) for place in places))
        for one in standings(cells)
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, tuple("---" for _ in head), *rows))


def _mb(one: Standing) -> str:
    return "-" if one.extra_mb is None else f"{one.extra_mb:+.0f}"


def _shown(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    figures, ratio = cell.figures, cell.ratios.to_plain
    if cell.proposer is None or ratio is None:
        return f"{figures.tokens_per_s:.0f} tokens/s"
    rounds = "?" if figures.tokens_per_round is None else f"{figures.tokens_per_round:.2f}"
    efficiency = "-" if figures.draft_efficiency is None else f"{figures.draft_efficiency:.0%}"
    return f"{ratio:.2f} ({cell.mode.removeprefix('fixed:')}: {rounds}, {efficiency})"


MEANINGS = """\
Each proposer was the only one asked, at the draft length that was fastest there: times plain's tokens per second (draft
length: tokens per round, accepted over drafted tokens). MB is the resident memory of a server with that proposer alone
over one without any, after the same requests."""
