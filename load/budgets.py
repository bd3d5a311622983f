"""What adaptive speculation must reach, the sentences that say where it did not, and those that doubt the figures."""

from collections.abc import Sequence

from .cells import Cell, RivalCell

PLAIN_BUDGET = 0.98
"""The least share of plain decoding's throughput that the adaptive mode may have."""
FIXED_BUDGET = 0.95
"""The least share of the best fixed gamma's throughput that the adaptive mode may have."""
SURE_ERRORS = 2.0
"""Standard errors that a ratio must be under its budget by to count as missed."""
QUIET_CORES = 0.15
"""Cores that strangers to the bench may use before its figures are doubted."""
BUSY_CLIENT = 0.1
"""Share of a core that the load generator may use before the figures are doubted."""


def missed(cells: Sequence[Cell], strict: bool = False) -> list[str]:
    """Return one sentence for each budget that a cell misses; `strict`: those in doubt or not checked, too."""
    found: list[str] = []
    for cell in cells:
        where = f"on {cell.workload} at concurrency {cell.concurrency}"
        if cell.mode == "adaptive":
            found += _slow(cell, "plain", where, strict)
            found += _slow(cell, "the best fixed gamma", where, strict)
        found += _differing(cell, where)
    if strict and not any(cell.mode == "adaptive" for cell in cells):
        found.append("adaptive was not measured, so its budgets could not be checked.")
    return found + _uncompared(cells, strict)


def outdone(cells: Sequence[Cell], strict: bool = False) -> list[str]:
    """Return one sentence for each budget that a proposer misses where each was measured by itself.

    Suffix decoding looks at what prompt lookup looks at and at the session's other answers too: where texts come again
    it must emit as many tokens a round, each at its best draft length.
    """
    found: list[str] = []
    levels = list(dict.fromkeys(cell.concurrency for cell in cells))
    for level in levels:
        most = {name: _most_tokens(cells, level, name) for name in ("suffix", "prompt_lookup")}
        suffix, lookup = most["suffix"], most["prompt_lookup"]
        where = f"on repeated at concurrency {level}"
        if suffix is not None and lookup is not None and suffix < lookup:
            found.append(f"suffix emits {suffix:.2f} tokens a round {where}, prompt_lookup {lookup:.2f}.")
        elif strict and (suffix is None or lookup is None):
            found.append(f"suffix could not be compared with prompt_lookup {where}.")
    for cell in cells:
        found += _differing(cell, f"on {cell.workload} at concurrency {cell.concurrency}")
    return found + _uncompared(cells, strict)


def _most_tokens(cells: Sequence[Cell], concurrency: int, proposer: str) -> float | None:
    found = [
        cell.figures.tokens_per_round
        for cell in cells
        if (cell.workload, cell.concurrency) == ("repeated", concurrency)
        and (cell.proposer or "").partition(":")[0] == proposer
    ]
    return max((one for one in found if one is not None), default=None)


def _differing(cell: Cell, where: str) -> list[str]:
    if not cell.differing:
        return []
    return [
        f"{cell.name} differs from plain's text in {cell.differing} of {cell.num_requests} requests {where}; "
        "the budget is 0."
    ]


def _uncompared(cells: Sequence[Cell], strict: bool) -> list[str]:
    if strict and any(cell.differing is None for cell in cells):
        return ["texts were not compared with plain's, which needs the mode plain and temperature 0."]
    return []


def _slow(cell: Cell, other: str, where: str, strict: bool) -> list[str]:
    """Return a sentence when the budget is missed by more than repeats differ; `strict`: when it is missed at all."""
    ratio, error, budget = _compared(cell, other)
    if ratio is None:
        return [f"adaptive could not be compared with {other} {where}."] if strict else []
    if ratio >= budget or (not strict and _in_doubt(ratio, error, budget)):
        return []
    return [f"adaptive is {_shown(ratio, error)} of {other} {where}; the budget is {budget}."]


def _compared(cell: Cell, other: str) -> tuple[float | None, float | None, float]:
    ratios = cell.ratios
    if other == "plain":
        return ratios.to_plain, ratios.to_plain_error, PLAIN_BUDGET
    return ratios.to_best_fixed, ratios.to_best_fixed_error, FIXED_BUDGET


def _in_doubt(ratio: float, error: float | None, budget: float) -> bool:
    return error is not None and ratio < budget <= ratio + SURE_ERRORS * error


def _shown(ratio: float, error: float | None) -> str:
    return f"{ratio:.3f}" if error is None else f"{ratio:.3f} ± {error:.3f}"


def _undecided(cells: Sequence[Cell]) -> list[str]:
    found = []
    for cell in cells:
        for other in ("plain", "the best fixed gamma") if cell.mode == "adaptive" else ():
            ratio, error, budget = _compared(cell, other)
            if ratio is not None and _in_doubt(ratio, error, budget):
                found.append(
                    f"adaptive is {_shown(ratio, error)} of {other} on {cell.workload} at concurrency "
                    f"{cell.concurrency}: whether that is under {budget} takes more repeats."
                )
    return found


def doubts(cells: Sequence[Cell], rivals: Sequence[RivalCell]) -> list[str]:
    """Return one sentence for each thing seen that makes figures worth less than they look."""
    found = _undecided(cells)
    cached = [cell for cell in cells if cell.figures.cached_prompt_tokens and cell.workload != "repeated"]
    if cached:
        found.append(
            f"In {len(cached)} of {len(cells)} cells the server found prompts in its prefix cache, so that passes of "
            "the same prompts do not compare; it seems not to know cache_salt."
        )
    others = [one.others_cpu_share for one in rivals] + [cell.figures.others_cpu_share for cell in cells]
    busy = [share for share in others if share is not None and share > QUIET_CORES]
    if busy:
        found.append(
            f"In {len(busy)} of {len(others)} cells other processes used the machine, up to {max(busy):.2f} cores: "
            "measure again when it is quiet" + (", above all the ratios to transformers." if rivals else ".")
        )
    client = max((cell.figures.client_cpu_share for cell in cells), default=0.0)
    if client > BUSY_CLIENT:
        found.append(f"The load generator itself used up to {client:.2f} of a core.")
    return found
