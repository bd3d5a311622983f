"""`specserve bench`: plain, fixed and adaptive speculation on the same prompts, interleaved."""

import argparse
import json
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .client import Client, LoadError, speculation
from .figures import PLAIN_BUDGET, Figures, Ratios, Sample, figures, medians, ratios
from .prompts import WORKLOADS, WorkloadName, prompts


@dataclass(frozen=True, slots=True)
class Cell:
    """The medians of one workload in one mode."""

    workload: str
    concurrency: int
    mode: str
    figures: Figures
    ratios: Ratios

    def as_json(self) -> dict[str, Any]:
        """Return the cell as the `--json` report holds it; memory is not visible over HTTP, hence null."""
        return {
            "workload": self.workload,
            "concurrency": self.concurrency,
            "mode": self.mode,
            **asdict(self.figures),
            "rss_mb": None,
            "gpu_mb": None,
            "ratio_to_plain": self.ratios.to_plain,
            "ratio_to_best_fixed": self.ratios.to_best_fixed,
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """What a bench run does."""

    url: str
    concurrency: int
    modes: tuple[str, ...]
    repeats: int
    max_tokens: int
    proposer: str | None


def run(args: argparse.Namespace) -> int:
    """Run the bench; returns 0, 1 when adaptive misses its budget, or 2 when nothing could be measured."""
    if args.url is None:
        print("Start a server with `specserve serve`, then pass --url http://127.0.0.1:8000", file=sys.stderr)
        return 2
    plan = Plan(args.url, args.concurrency, tuple(args.modes), args.repeats, args.max_tokens, args.proposer)
    client = Client(plan.url)
    try:
        model = client.model_id()
        cells = [cell for workload in WORKLOADS for cell in measure(client, model, workload, plan)]
    except LoadError as error:
        print(f"specserve bench: {error.message}", file=sys.stderr)
        return 2
    finally:
        client.close()
    print(table(cells))
    if args.json is not None:
        Path(args.json).write_text(json.dumps(report(model, cells), indent=1) + "\n")
    missed = missed_budgets(cells)
    for sentence in missed:
        print(f"specserve bench: {sentence}", file=sys.stderr)
    return 1 if missed else 0


def measure(client: Client, model: str, workload: WorkloadName, plan: Plan) -> list[Cell]:
    """Return one cell a mode.

    A warm-up pass of each mode comes first; then each repeat runs every mode in turn, so that a slow minute of the
    machine falls on all modes alike.
    """
    passes: dict[str, list[Figures]] = {mode: [] for mode in plan.modes}
    total = len(prompts(workload)) * len(plan.modes) * (plan.repeats + 1)
    with tqdm(total=total, desc=workload, unit="request") as bar:
        for repeat in range(plan.repeats + 1):
            for mode in plan.modes:
                measured = one_pass(client, model, workload, mode, plan, bar)
                if repeat > 0:
                    passes[mode].append(measured)
    by_mode = {mode: medians(found) for mode, found in passes.items()}
    found_ratios = ratios(by_mode)
    return [Cell(workload, plan.concurrency, mode, by_mode[mode], found_ratios[mode]) for mode in plan.modes]


def one_pass(
    client: Client, model: str, workload: WorkloadName, mode: str, plan: Plan, bar: "tqdm[Any] | None" = None
) -> Figures:
    """Return the figures of the workload's prompts, `plan.concurrency` at a time."""
    wanted = speculation(mode, plan.proposer)
    samples: list[Sample] = []
    started = time.perf_counter()
    with ThreadPoolExecutor(plan.concurrency) as pool:
        for sample in pool.map(lambda one: client.stream(model, one, plan.max_tokens, wanted), prompts(workload)):
            samples.append(sample)
            if bar is not None:
                bar.update()
    return figures(samples, time.perf_counter() - started)


def missed_budgets(cells: list[Cell]) -> list[str]:
    """Return one sentence for each workload where adaptive is slower than its budget against plain."""
    return [
        f"adaptive is {cell.ratios.to_plain:.3f} of plain on {cell.workload}; the budget is {PLAIN_BUDGET}."
        for cell in cells
        if cell.mode == "adaptive" and cell.ratios.to_plain is not None and cell.ratios.to_plain < PLAIN_BUDGET
    ]


def table(cells: list[Cell]) -> str:
    """Return the cells as a markdown table."""
    head = (
        "workload", "concurrency", "mode", "tokens/s", "tokens/round", "TTFT p50 ms", "ITL p50 ms", "TPOT p50 ms",
        "ratio_to_plain", "ratio_to_best_fixed",
    )  # fmt: skip
    rows = [
        (
            cell.workload,
            str(cell.concurrency),
            cell.mode,
            _shown(cell.figures.tokens_per_s, 1),
            _shown(cell.figures.tokens_per_round, 2),
            _shown(cell.figures.ttft_ms_p50, 1),
            _shown(cell.figures.itl_ms_p50, 2),
            _shown(cell.figures.tpot_ms_p50, 2),
            _shown(cell.ratios.to_plain, 3),
            _shown(cell.ratios.to_best_fixed, 3),
        )
        for cell in cells
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, tuple("---" for _ in head), *rows))


def _shown(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def report(model: str, cells: list[Cell]) -> dict[str, Any]:
    """Return the `--json` document; `dtype` and `hardware` are the client's knowledge only."""
    return {
        "commit": _commit(),
        "hardware": f"{platform.machine()} {platform.system()} (client)",
        "model": model,
        "dtype": None,
        "cells": [cell.as_json() for cell in cells],
    }


def _commit() -> str | None:
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()
