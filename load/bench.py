"""`specserve bench`: plain, fixed and adaptive speculation on the same prompts, interleaved."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from .budgets import doubts, missed
from .cells import Cell, RivalCell, cells_of, check_same_prompts
from .client import Ask, Client, ServerFacts, speculation
from .errors import LoadError
from .figures import Pass
from .plan import Plan, plan_from
from .processes import others_cpu_s, rss_mb
from .progress import Progress
from .prompts import Prompt, cycled, prompts
from .report import Run, document, table, write_report
from .rival import PREFIX, Rival, rival, rival_command
from .server import ended_by_signals, free_port, serve_command, serving

WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Contestant:
    """Somebody who can do a pass: `run` takes prompts, concurrency and new tokens a request."""

    name: str
    run: Callable[[Sequence[Prompt], int, int], Pass]


def run(args: argparse.Namespace) -> int:
    """Run the bench; returns 0, 1 when a budget is missed, or 2 when something could not be measured."""
    try:
        plan = plan_from(args)
        with ended_by_signals():
            found = measured(plan)
    except LoadError as error:
        print(f"specserve bench: {error.message}", file=sys.stderr)
        return 2
    sentences = missed(found.cells, plan.strict)
    print(table(found))
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
        pid = None
        url = plan.url
        if url is None:
            port = free_port()
            server = stack.enter_context(serving(serve_command(plan.model, plan.placement, port), port))
            url, pid = server.url, server.pid
        client = Client(url)
        facts = client.facts()
        if other is not None and facts.dtype not in (None, other.dtype):
            raise LoadError(f"The server computes in {facts.dtype} and transformers in {other.dtype}.")
        ours = [_mode(client, facts, plan, mode) for mode in plan.modes]
        cells, rivals = measure(client, facts, plan, ours, other, pid)
    return Run(plan, facts, cells, rivals, {} if other is None else other.versions)


def measure(
    client: Client,
    facts: ServerFacts,
    plan: Plan,
    ours: Sequence[Contestant],
    other: Rival | None = None,
    pid: int | None = None,
) -> tuple[list[Cell], list[RivalCell]]:
    """Return the cells of every workload at every concurrency, and transformers' beside them."""
    most = max(plan.num_requests(one) for one in plan.concurrency)
    texts = {name: client.fitted(prompts(name)[:most], facts, plan.max_tokens) for name in plan.workloads}
    lineups = {
        level: [watched(one, pid) for one in (*ours, *_settings(other, plan, level))] for level in plan.concurrency
    }
    passes = plan.repeats * len(plan.workloads)
    progress = Progress(sum(passes * plan.num_requests(one) * len(lineups[one]) for one in plan.concurrency))
    cells: list[Cell] = []
    rivals: list[RivalCell] = []
    try:
        for concurrency, lineup in lineups.items():
            warm_up(lineup, cycled(texts[plan.workloads[0]], concurrency), concurrency, plan.max_tokens)
            for workload in plan.workloads:
                progress.begin(f"{workload} x{concurrency}")
                chosen = cycled(texts[workload], plan.num_requests(concurrency))
                done = interleaved(lineup, chosen, concurrency, plan, progress)
                if other is not None:
                    check_same_prompts(done)
                found = cells_of(workload, concurrency, done, plan.greedy)
                progress.finished(*found)
                cells += found[0]
                rivals += found[1]
    finally:
        progress.close()
    return cells, rivals


def warm_up(lineup: Sequence[Contestant], chosen: Sequence[Prompt], concurrency: int, max_tokens: int) -> None:
    """Let every contestant do one short pass that does not count."""
    for one in lineup:
        one.run(chosen, concurrency, min(WARM_UP_TOKENS, max_tokens))


def interleaved(
    lineup: Sequence[Contestant], chosen: Sequence[Prompt], concurrency: int, plan: Plan, progress: Progress
) -> dict[str, list[Pass]]:
    """Return each contestant's passes.

    Every repeat runs all of them in turn, so that a slow minute of the machine falls on all alike, and begins with
    another one, so that none is always the one that comes first.
    """
    passes: dict[str, list[Pass]] = {one.name: [] for one in lineup}
    for repeat in range(plan.repeats):
        first = repeat % len(lineup)
        for one in (*lineup[first:], *lineup[:first]):
            passes[one.name].append(one.run(chosen, concurrency, plan.max_tokens))
            progress.advance(len(chosen))
    return passes


def watched(one: Contestant, pid: int | None) -> Contestant:
    """Return the contestant with what its passes cost: memory, and what strangers took of the machine meanwhile.

    `pid` is our server's; without it both stay unknown, since the server would count as a stranger.
    """
    if pid is None:
        return one
    families = (os.getpid(), pid)

    def one_pass(chosen: Sequence[Prompt], concurrency: int, max_tokens: int) -> Pass:
        before, started = others_cpu_s(families), time.perf_counter()
        done = one.run(chosen, concurrency, max_tokens)
        after, wall_s = others_cpu_s(families), time.perf_counter() - started
        share = None if before is None or after is None else max(0.0, (after - before) / wall_s)
        return replace(done, rss_mb=rss_mb(pid), others_cpu_share=share)

    return Contestant(one.name, one_pass)


def _mode(client: Client, facts: ServerFacts, plan: Plan, mode: str) -> Contestant:
    wanted = speculation(mode, plan.proposer)

    def one_pass(chosen: Sequence[Prompt], concurrency: int, max_tokens: int) -> Pass:
        return client.run_pass(facts.model, chosen, concurrency, Ask(wanted, max_tokens, plan.temperature))

    return Contestant(mode, one_pass)


def _settings(other: Rival | None, plan: Plan, concurrency: int) -> list[Contestant]:
    """Return transformers' contestants; it can speculate for one request at a time only."""
    if other is None:
        return []

    def contestant(setting: str) -> Contestant:
        def one_pass(chosen: Sequence[Prompt], concurrency: int, max_tokens: int) -> Pass:
            return other.run_pass(setting, chosen, concurrency, max_tokens, plan.temperature)

        return Contestant(f"{PREFIX}{setting}", one_pass)

    return [contestant(setting) for setting in other.settings if setting == "plain" or concurrency == 1]
