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
    places = _places(cells)
    rows = [
        (one.proposer or "plain", _mb(one), *(_shown(one.fastest.get(place)) for place in places))
        for one in standings(cells)
    ]
    return _table(("proposer", "MB", *map(_place_name, places)), rows)


def tokens_by_length(cells: Sequence[Cell]) -> str:
    """Return a markdown table of the tokens per round at every draft length, laid out like the ranking."""
    places = _places(cells)
    found: dict[tuple[str, Place], list[str]] = {}
    for cell in cells:
        rounds = cell.figures.tokens_per_round
        if cell.proposer is not None and rounds is not None:
            shown = f"{_length(cell)}: {rounds:.2f}"
            found.setdefault((cell.proposer, (cell.concurrency, cell.workload)), []).append(shown)
    names = dict.fromkeys(name for name, _ in found)
    rows = [(name, *(", ".join(found.get((name, place), ["-"])) for place in places)) for name in names]
    return _table(("tokens per round", *map(_place_name, places)), rows)


def _places(cells: Sequence[Cell]) -> list[Place]:
    return list(dict.fromkeys((cell.concurrency, cell.workload) for cell in cells))


def _place_name(place: Place) -> str:
    concurrency, workload = place
    return f"{workload.replace('_', '-')}, {concurrency} at once"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, tuple("---" for _ in head), *rows))


def _length(cell: Cell) -> str:
    return cell.mode.removeprefix("fixed:")


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
    return f"{ratio:.2f} ({_length(cell)}: {rounds}, {efficiency})"


MEANINGS = """\
Each proposer was the only one asked, at the draft length that was fastest there: times plain's tokens per second (draft
length: tokens per round, accepted over drafted tokens). MB is the resident memory of a server with that proposer alone
over one without any, after the same requests."""
