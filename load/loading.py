"""`specserve load`: open-loop traffic with tiers and ramps, the same for every mode, one mode after the other."""

import argparse
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from .client import Ask, Client, speculation
from .errors import LoadError
from .hardware import commit, hardware
from .promises import doubts, missed
from .prompts import cycled, prompts, workload_name
from .replay import Replay, Served, replayed, table
from .report import command
from .server import ended_by_signals, free_port, serve_command, serving
from .traffic import Arrival, arrivals, shape, tier_shares
from .turns import in_turns

OBJECTIVES_MS = {"priority": 30.0, "default": 80.0, "flex": 200.0}
PLOT_NAME = "load.png"


def run(args: argparse.Namespace) -> int:
    """Run the traffic; returns 0, 1 when adaptive keeps a promise of its own less well than another mode, or 2."""
    try:
        traffic = shape(args.shape, args.seconds)
        shares = tier_shares(args.tiers)
        objectives = _objectives(args.objectives, shares)
        for mode in args.modes:
            speculation(mode)
        with ended_by_signals():
            runs = measured(args, arrivals(traffic, shares, args.seed), objectives)
    except LoadError as error:
        print(f"specserve load: {error.message}", file=sys.stderr)
        return 2
    sentences = missed(runs)
    print(table(runs))
    if args.json is not None:
        about = {"commit": commit(), "hardware": hardware(), "command": command(), "missed": sentences}
        Path(args.json).write_text(json.dumps({**about, "runs": [asdict(one) for one in runs]}, indent=1) + "\n")
    if args.report is not None:
        _write_report(runs, sentences, Path(args.report))
    for sentence in (*doubts(runs), *sentences):
        print(f"specserve load: {sentence}", file=sys.stderr)
    return 1 if sentences else 0


def measured(args: argparse.Namespace, coming: Sequence[Arrival], objectives_ms: Mapping[str, float]) -> list[Replay]:
    """Return what each mode gave, taken in turns. Raises LoadError when nothing comes or a server fails."""
    if not coming:
        raise LoadError("No request comes in that time; take a higher rate or more seconds.")
    with ExitStack() as stack:
        url = args.url
        if url is None:
            port = free_port()
            url = stack.enter_context(serving(serve_command(args.model, args.placement, port), port)).url
        client = Client(url)
        facts = client.facts()
        found = cycled(client.fitted(prompts(workload_name(args.workload)), facts, args.max_tokens), len(coming))
        client.run_pass(facts.model, found[:2], 2, Ask({"mode": "auto"}, args.max_tokens, 0.0))
        passes: dict[str, list[list[Served]]] = {mode: [] for mode in args.modes}
        for mode in in_turns(args.modes, args.repeats):
            asks = [Ask(speculation(mode), args.max_tokens, 0.0, one.tier) for one in coming]
            samples = client.run_open(facts.model, [one.at_s for one in coming], found, asks)
            passes[mode].append([Served(*pair) for pair in zip(coming, samples, strict=True)])
            _say(mode, passes[mode], args.repeats)
    return [replayed(mode, served, objectives_ms) for mode, served in passes.items()]


def _say(mode: str, passes: Sequence[Sequence[Served]], repeats: int) -> None:
    last = replayed(mode, passes[-1:], dict.fromkeys((one.arrival.tier for one in passes[-1]), 0.0))
    print(
        f"{mode} {len(passes)}/{repeats}: {last.tokens_per_s:.1f} tokens/s in {last.seconds:.1f} s",
        file=sys.stderr,
        flush=True,
    )


def _objectives(parts: tuple[str, ...], shares: Mapping[str, float]) -> dict[str, float]:
    """Return each tier's objective in milliseconds a token, those given over the defaults. Raises LoadError."""
    found = {tier: OBJECTIVES_MS.get(tier, OBJECTIVES_MS["default"]) for tier in shares}
    for part in parts:
        tier, _, text = part.partition("=")
        if tier not in found or not text.replace(".", "", 1).isdecimal():
            raise LoadError(f"An objective is tier=milliseconds of a tier that comes, like priority=8; not {part!r}.")
        found[tier] = float(text)
    return found


def _write_report(runs: Sequence[Replay], sentences: Sequence[str], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    drawn = _draw(runs, folder / PLOT_NAME)
    lines = [f"`{command()}`", "", *([f"![trace]({PLOT_NAME})", ""] if drawn else []), table(runs), "", *sentences]
    (folder / "load.md").write_text("\n".join(lines) + "\n")


def _draw(runs: Sequence[Replay], path: Path) -> bool:
    """Write the traces: arrivals, gamma, time a token and unfinished requests by second. False without matplotlib."""
    try:
        importlib.import_module("matplotlib").use("Agg")
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        print("specserve load: there is no plot, since matplotlib is not installed.", file=sys.stderr)
        return False
    figure, axes = pyplot.subplots(4, 1, figsize=(9, 11), sharex=True, layout="constrained")
    names = ("num_arrived", "draft_tokens_per_round", "tpot_ms", "num_unfinished")
    titles = ("requests a second", "draft tokens a round", "ms a token", "unfinished requests")
    for axis, name, title in zip(axes, names, titles, strict=True):
        for one in runs[:1] if name == "num_arrived" else runs:
            points = [(at.at_s, value) for at in one.trace if (value := getattr(at, name)) is not None]
            axis.plot(*zip(*points, strict=True), label=one.mode, linewidth=2.2 if one.mode == "adaptive" else 1.0)
        axis.set_ylabel(title)
    axes[1].legend(ncols=len(runs), fontsize="small")
    axes[-1].set_xlabel("seconds")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True
