"""The bench's results as JSON, as a table, and as a folder with a page and its plot."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .budgets import doubts
from .cells import Cell, RivalCell
from .client import ServerFacts
from .hardware import commit, hardware
from .plan import Plan
from .plot import draw
from .ranking import MEANINGS as RANKING_MEANINGS
from .ranking import ranking, standings, tokens_by_length

PLOT_NAME = "throughput.png"


@dataclass(frozen=True, slots=True)
class Run:
    """Everything one bench run found; `versions` are of the libraries it was compared with."""

    plan: Plan
    facts: ServerFacts
    cells: list[Cell]
    rivals: list[RivalCell]
    versions: dict[str, str]
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))


def document(run: Run, missed: Sequence[str]) -> dict[str, Any]:
    """Return the `--json` document; `hardware` is the bench's own machine, `dtype` what the server says it uses."""
    plan = run.plan
    return {
        "commit": commit(),
        "hardware": hardware(),
        "model": run.facts.model,
        "dtype": run.facts.dtype,
        "version": run.facts.version,
        "placement": run.facts.placement or (plan.placement if plan.url is None else None),
        "date": run.date,
        "command": command(),
        "repeats": plan.repeats,
        "max_tokens": plan.max_tokens,
        "temperature": plan.temperature,
        "missed": list(missed),
        "doubts": doubts(run.cells, run.rivals),
        "cells": [cell.as_json() for cell in run.cells],
        "proposers": [one.as_json() for one in standings(run.cells)] if plan.proposers else [],
        "transformers": {"versions": run.versions, "cells": [asdict(one) for one in run.rivals]},
    }


def command() -> str:
    """Return the command line that is running, as one would type it."""
    return shlex.join(["specserve", *sys.argv[1:]])


def table(run: Run) -> str:
    """Return the cells as a markdown table, transformers' after ours of the same workload and concurrency."""
    head = (
        "workload", "concurrency", "mode", "tokens/s", "tokens/round", "draft efficiency", "TTFT p50 ms", "ITL p50 ms",
        "TPOT p50 ms", "RSS MB", "others' cores", "differing", "ratio_to_plain", "ratio_to_best_fixed",
        "ratio_to_transformers",
    )  # fmt: skip
    rows: list[tuple[str, ...]] = []
    for place, cell in enumerate(run.cells):
        rows.append(_row(cell))
        here = (cell.workload, cell.concurrency)
        if place + 1 == len(run.cells) or (run.cells[place + 1].workload, run.cells[place + 1].concurrency) != here:
            rows += [_rival_row(one, len(head)) for one in run.rivals if (one.workload, one.concurrency) == here]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, tuple("---" for _ in head), *rows))


def _row(cell: Cell) -> tuple[str, ...]:
    return (
        cell.workload,
        str(cell.concurrency),
        cell.name,
        _shown(cell.figures.tokens_per_s, 1),
        _shown(cell.figures.tokens_per_round, 2),
        _shown(cell.figures.draft_efficiency, 2),
        _shown(cell.figures.ttft_ms_p50, 1),
        _shown(cell.figures.itl_ms_p50, 2),
        _shown(cell.figures.tpot_ms_p50, 2),
        _shown(cell.figures.rss_mb, 0),
        _shown(cell.figures.others_cpu_share, 2),
        "-" if cell.differing is None else str(cell.differing),
        _shown(cell.ratios.to_plain, 3),
        _shown(cell.ratios.to_best_fixed, 3),
        _shown(cell.ratios.to_transformers, 3),
    )


def _rival_row(one: RivalCell, num_columns: int) -> tuple[str, ...]:
    known = (one.workload, str(one.concurrency), f"transformers {one.setting}", _shown(one.tokens_per_s, 1))
    busy = (*("-",) * 6, _shown(one.others_cpu_share, 2))
    return (*known, *busy, *("-",) * (num_columns - len(known) - len(busy)))


def _shown(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def write_report(run: Run, missed: Sequence[str], folder: Path) -> None:
    """Write `report.md` into `folder`, and the plot beside it where matplotlib is installed.

    Each proposer by itself has no plot: a line for every one at every length says nothing.
    """
    drawn = not run.plan.proposers and draw(run.cells, run.rivals, folder / PLOT_NAME)
    if not drawn and not run.plan.proposers:
        print("specserve bench: there is no plot, since matplotlib is not installed.", file=sys.stderr)
    (folder / "report.md").write_text(markdown(run, missed, PLOT_NAME if drawn else None))


def markdown(run: Run, missed: Sequence[str], plot: str | None) -> str:
    """Return the page: what was run on what, the plot, the budgets missed, the table, and what its columns mean."""
    plan, facts, machine = run.plan, run.facts, hardware()
    placement = facts.placement or (plan.placement if plan.url is None else "unknown placement")
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    parts = [
        f"# {facts.model}: {'each proposer by itself' if plan.proposers else 'plain, fixed and adaptive speculation'}",
        f"{run.date}, commit `{commit()}`, specserve {facts.version}. {facts.dtype or 'unknown dtype'}, {placement}, "
        f"{'greedy' if plan.greedy else f'temperature {plan.temperature}'}, {plan.max_tokens} new tokens a request, "
        f"medians of {plan.repeats} interleaved repeats. {machine['cores']} cores of {machine['cpu']}, "
        f"{machine['memory_gb']} GB, {machine['system']}." + (f" Compared with {versions}." if versions else ""),
        f"```sh\n{command()}\n```",
        f"![Tokens per second and ratios]({plot})" if plot is not None else "",
        *(
            ("## Proposers", ranking(run.cells), RANKING_MEANINGS, tokens_by_length(run.cells))
            if plan.proposers
            else ()
        ),
        "## Budgets",
        _listed(missed) or "None was missed.",
        _listed(doubts(run.cells, run.rivals)),
        "## Figures",
        table(run),
        MEANINGS,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _listed(sentences: Sequence[str]) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences)


MEANINGS = """\
Tokens per second are output tokens over wall time, prompt processing included: at concurrency 1 over the requests' own
times, above it over the whole pass. TTFT is the time to the first text. ITL is the gap between two chunks, each of
which carries all tokens of a round, so it grows with speculation; TPOT is the time a token after the first.
Draft efficiency is accepted over drafted tokens. Others' cores are what processes that have nothing to do with the
bench used meanwhile: figures with more than a few hundredths there say little. Differing counts requests whose greedy
text is not plain's.
`ratio_to_transformers` compares plain decoding with transformers' plain `generate`, batched to the same concurrency,
and the other modes with its fastest setting at that concurrency."""
