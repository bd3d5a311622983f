"""`specserve bench`: plain, fixed and adaptive speculation, or each proposer, on the same prompts, interleaved."""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from .budgets import doubts, missed, outdone
from .cells import Cell, RivalCell, cells_of, check_same_prompts
from .errors import LoadError
from .figures import Pass
from .lineup import Contestant, Lineup, lineup, watched
from .plan import Plan, plan_from
from .progress import Progress
from .prompts import Prompt, chosen, cycled, prompts
from .ranking import ranking
from .report import Run, document, table, write_report
from .rival import PREFIX, Rival, rival, rival_command
from .server import ended_by_signals
from .turns import in_turns

WARM_UP_TOKENS = 16


def run(args: argparse.Namespace) -> int:
    """Run the bench; returns 0, 1 when a budget is missed, or 2 when something could not be measured."""
    try:
        plan = plan_from(args)
        with ended_by_signals():
            found = measured(plan)
    except LoadError as error:
        print(f"specserve bench: {error.message}", file=sys.stderr)
        return 2
    sentences = (outdone if plan.proposers else missed)(found.cells, plan.strict)
    print(ranking(found.cells) if plan.proposers else table(found))
    if plan.json_path is not None:
        plan.json_path.write_text(json.dumps(document(found, sentences), indent=1) + "\n")
    if plan.report_dir is not None:
        write_report(found, sentences, plan.report_dir)
    for sentence in (*doubts(found.cells, found.rivals), *sentences):
        print(f"specserve bench: {sentence}", file=sys.stderr)
    return 1 if sentences else 0


def measured(plan: Plan) -> Run:
    """Return what the plan's cells are.

    Transformers' process starts first: a server measures at its start what its own rounds cost, and must be alone then.
    Raises: LoadError when a server, or transformers, fails.
    """
    with ExitStack() as stack:
        other = stack.enter_context(rival(rival_command(plan.model))) if plan.against_transformers else None
        ours = lineup(plan, stack)
        if other is not None and ours.facts.dtype not in (None, other.dtype):
            raise LoadError(f"The server computes in {ours.facts.dtype} and transformers in {other.dtype}.")
        cells, rivals = measure(ours, plan, other)
    return Run(plan, ours.facts, cells, rivals, {} if other is None else other.versions)


def measure(ours: Lineup, plan: Plan, other: Rival | None = None) -> tuple[list[Cell], list[RivalCell]]:
    """Return the cells of every workload at every concurrency, and transformers' beside them."""
    most = max(plan.concurrency)
    texts = {
        name: ours.client.fitted(chosen(prompts(name), plan.num_prompts, most), ours.facts, plan.max_tokens)
        for name in plan.workloads
    }
    lineups = {level: (*ours.contestants, *_settings(other, ours, plan, level)) for level in plan.concurrency}
    places = [(level, name) for level in plan.concurrency for name in plan.workloads]
    taken = {(level, name): chosen(texts[name], plan.num_prompts, level) for level, name in places}
    able = {place: [one for one in lineups[place[0]] if one.can_draft(taken[place])] for place in places}
    progress = Progress(plan.repeats * sum(len(taken[place]) * len(able[place]) for place in places))
    cells: list[Cell] = []
    rivals: list[RivalCell] = []
    try:
        for level, workload in places:
            if workload == plan.workloads[0]:
                warm_up(lineups[level], cycled(texts[workload], level), level, plan.max_tokens)
            progress.begin(f"{workload} x{level}")
            done = interleaved(able[level, workload], taken[level, workload], level, plan, progress)
            if other is not None:
                check_same_prompts(done)
            found = cells_of(workload, level, done, plan.greedy)
            progress.finished(*found)
            cells += found[0]
            rivals += found[1]
    finally:
        progress.close()
    return cells, rivals


def warm_up(turns: Sequence[Contestant], taken: Sequence[Prompt], concurrency: int, max_tokens: int) -> None:
    """Let every contestant do one short pass that does not count."""
    for one in turns:
        one.run(taken, concurrency, min(WARM_UP_TOKENS, max_tokens))


def interleaved(
    turns: Sequence[Contestant], taken: Sequence[Prompt], concurrency: int, plan: Plan, progress: Progress
) -> dict[str, list[Pass]]:
    """Return each contestant's passes, taken in turns."""
    passes: dict[str, list[Pass]] = {one.name: [] for one in turns}
    for one in in_turns(turns, plan.repeats):
        passes[one.name].append(one.run(taken, concurrency, plan.max_tokens))
        progress.advance(len(taken))
    return passes


def _settings(other: Rival | None, ours: Lineup, plan: Plan, concurrency: int) -> list[Contestant]:
    """Return transformers' contestants; it can speculate for one request at a time only."""
    if other is None:
        return []

    def contestant(setting: str) -> Contestant:
        def one_pass(taken: Sequence[Prompt], concurrency: int, max_tokens: int) -> Pass:
            return other.run_pass(setting, taken, concurrency, max_tokens, plan.temperature)

        return watched(Contestant(f"{PREFIX}{setting}", one_pass), None, ours.families)

    return [contestant(setting) for setting in other.settings if setting == "plain" or concurrency == 1]
