"""The picture of a bench run, for those who have matplotlib."""

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .budgets import PLAIN_BUDGET
from .cells import Cell, RivalCell

COLOURS = {"plain": "#7f7f7f", "adaptive": "#d62728"}
FIXED_COLOURS = ("#9ecae1", "#4292c6", "#08519c", "#08306b", "#6a51a3", "#3f007d")
RIVAL_COLOURS = {"plain": "#74c476", "prompt_lookup": "#238b45", "assistant": "#00441b"}


def draw(cells: Sequence[Cell], rivals: Sequence[RivalCell], path: Path) -> bool:
    """Write the plot: a column a workload, throughput above, ratios to plain below. False without matplotlib."""
    try:
        matplotlib = importlib.import_module("matplotlib")
        matplotlib.use("Agg")
        pyplot = importlib.import_module("matplotlib.pyplot")
        ticker = importlib.import_module("matplotlib.ticker")
    except ImportError:
        return False
    workloads = list(dict.fromkeys(cell.workload for cell in cells))
    figure, axes = pyplot.subplots(
        2,
        len(workloads),
        figsize=(1.5 + 4 * len(workloads), 7),
        squeeze=False,
        sharex="col",
        sharey="row",
        layout="constrained",
    )
    for column, workload in enumerate(workloads):
        ours = [cell for cell in cells if cell.workload == workload]
        theirs = [one for one in rivals if one.workload == workload]
        _lines(axes[0][column], ours, lambda cell: cell.figures.tokens_per_s, theirs)
        _lines(axes[1][column], ours, lambda cell: cell.ratios.to_plain, [])
        axes[0][column].set(title=workload.replace("_", "-"), yscale="log")
        axes[1][column].axhline(PLAIN_BUDGET, color="black", linewidth=0.7, linestyle=":")
        axes[1][column].set(xlabel="requests in flight")
    axes[0][0].yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes[0][0].yaxis.set_major_formatter("{x:g}")
    axes[0][0].yaxis.set_minor_formatter("")
    axes[0][0].set_ylabel("tokens per second")
    axes[1][0].set_ylabel(f"ratio to plain (dotted: {PLAIN_BUDGET})")
    _legend(figure, axes[0], 2 * len(workloads))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def _legend(figure: Any, axes: Sequence[Any], num_columns: int) -> None:
    """Put the names of all lines of `axes` under the picture."""
    handles: dict[str, Any] = {}
    for axis in axes:
        handles |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    columns = min(num_columns, len(handles))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns)


def _lines(
    axis: Any, cells: Sequence[Cell], value: Callable[[Cell], float | None], rivals: Sequence[RivalCell]
) -> None:
    """Draw one line a mode over concurrency, and a dashed one for each of transformers' settings."""
    fixed = sorted(
        {cell.mode for cell in cells if cell.mode.startswith("fixed:")}, key=lambda mode: int(mode.split(":")[1])
    )
    colours = COLOURS | {mode: FIXED_COLOURS[place % len(FIXED_COLOURS)] for place, mode in enumerate(fixed)}
    for mode in dict.fromkeys(cell.mode for cell in cells):
        points = [
            (cell.concurrency, height) for cell in cells if cell.mode == mode and (height := value(cell)) is not None
        ]
        if not points:
            continue
        axis.plot(*zip(*sorted(points), strict=True), marker="o", markersize=4, color=colours[mode], label=mode)
    for setting in dict.fromkeys(one.setting for one in rivals):
        theirs = [(one.concurrency, one.tokens_per_s) for one in rivals if one.setting == setting]
        label, colour = f"transformers {setting}", RIVAL_COLOURS.get(setting)
        axis.plot(
            *zip(*sorted(theirs), strict=True), marker="s", markersize=4, linestyle="--", color=colour, label=label
        )
    levels = sorted({cell.concurrency for cell in cells})
    axis.set_xscale("log", base=2)
    axis.set_xticks(levels, [str(level) for level in levels])
    axis.grid(alpha=0.3)
