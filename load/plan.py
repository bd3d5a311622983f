"""What a bench run does, from its command line; wrong wishes are refused before anything is started."""

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .client import speculation
from .errors import LoadError
from .prompts import WORKLOADS, WorkloadName, workload_name
from .server import Placement

SWEEP_CONCURRENCY = (1, 4, 16)
SWEEP_MODES = ("plain", "fixed:2", "fixed:4", "fixed:8", "adaptive")
ALL = "all"
"""Stands for every proposer that a running server offers."""
PROPOSER_WORKLOADS: tuple[WorkloadName, ...] = ("copy_heavy", "code", "open_ended", "repeated")
PROPOSER_CONCURRENCY = (1, 8)
PROPOSER_MODES = ("fixed:2", "fixed:4", "fixed:8")


def _shapes(flag: str) -> dict[str, tuple[str, ...]]:
    return {shape: (flag, shape) for shape in ("tree", "chain")}


VARIANTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "suffix": _shapes("--suffix-drafts"),
    "draft": {"int8": ("--draft-quantization", "int8")},
    **{name: _shapes("--head-drafts") for name in ("eagle", "eagle3", "medusa", "mtp")},
}
"""In which ways a proposer may be served, and how `specserve serve` is told; without a tree, the plain name is one."""
SERVE_FLAGS = ("draft", "eagle", "eagle3", "medusa", "mtp", "layer_skip", "early_exit")
"""What `specserve serve` is told of models and layers that draft."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a bench run does. Without `url` it serves `model` (None: the embedded one) itself, with `serve_flags`.

    With `proposers` each of these is measured by itself beside plain decoding; `suffix:chain` is one, too.
    """

    model: str | None = None
    url: str | None = None
    placement: Placement = "actors"
    workloads: tuple[WorkloadName, ...] = ("copy_heavy", "open_ended")
    concurrency: tuple[int, ...] = (1,)
    modes: tuple[str, ...] = ("plain", "fixed:4", "adaptive")
    repeats: int = 3
    num_prompts: int = 8
    max_tokens: int = 128
    temperature: float = 0.0
    proposer: str | None = None
    proposers: tuple[str, ...] = ()
    serve_flags: tuple[str, ...] = ()
    against_transformers: bool = False
    json_path: Path | None = None
    report_dir: Path | None = None
    strict: bool = False

    @property
    def greedy(self) -> bool:
        """True when texts of different modes must be equal."""
        return self.temperature == 0


def plan_from(args: argparse.Namespace) -> Plan:
    """Return the plan that the command line asks for. Raises LoadError for a mode, workload or file that cannot be."""
    usual = _usual(args)
    plan = Plan(
        model=args.model,
        url=args.url,
        placement=args.placement or usual.placement,
        workloads=tuple(dict.fromkeys(workload_name(name) for name in args.workloads or usual.workloads)),
        concurrency=tuple(dict.fromkeys(args.concurrency or usual.concurrency)),
        modes=tuple(dict.fromkeys(args.modes or usual.modes)),
        repeats=args.repeats,
        num_prompts=args.prompts,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        proposer=args.proposer,
        proposers=_proposers(args),
        serve_flags=_serve_flags(args),
        against_transformers=args.against == "transformers",
        json_path=None if args.json is None else Path(args.json),
        report_dir=None if args.report is None else Path(args.report),
        strict=args.check,
    )
    for mode in plan.modes:
        speculation(mode)
    if args.proposers is not None:
        _check_proposers(args, plan)
    _check_files(plan)
    return plan


def _usual(args: argparse.Namespace) -> Plan:
    """Return what is done where the command line says nothing else."""
    if args.proposers is not None:
        return Plan(
            placement="inline",
            workloads=PROPOSER_WORKLOADS,
            concurrency=PROPOSER_CONCURRENCY,
            modes=PROPOSER_MODES,
        )
    if args.sweep:
        return Plan(workloads=WORKLOADS, concurrency=SWEEP_CONCURRENCY, modes=SWEEP_MODES)
    return Plan()


def variant_of(proposer: str) -> tuple[str, tuple[str, ...]]:
    """Return the name in `eagle3:tree` and the flags that make it so; none for what has no variants."""
    name, _, variant = proposer.partition(":")
    flags = VARIANTS.get(name, {}).get(variant)
    return (proposer, ()) if flags is None else (name, flags)


def _proposers(args: argparse.Namespace) -> tuple[str, ...]:
    """Return what is measured, in all its variants where `all` is asked for.

    Raises: LoadError for a proposer that lacks what it needs.
    """
    wanted: tuple[str, ...] = tuple(dict.fromkeys(args.proposers or ()))
    if args.url is not None or not wanted:
        return wanted
    if wanted == (ALL,):
        return tuple(one for name in args.buildable for one in _variants(name))
    names = {one: variant_of(one)[0] for one in wanted}
    lacking = [one for one, name in names.items() if ":" not in name and name not in args.buildable]
    if lacking:
        raise LoadError(
            f"{', '.join(lacking)} cannot be built of what is given, but {', '.join(args.buildable)}; `specserve "
            "proposers` says what each needs."
        )
    return wanted


def _variants(name: str) -> tuple[str, ...]:
    """Return every variant of a proposer, its plain name where that is one of them."""
    variants = VARIANTS.get(name, {})
    named = tuple(f"{name}:{variant}" for variant in variants)
    return named if "tree" in variants else (name, *named)


def _serve_flags(args: argparse.Namespace) -> tuple[str, ...]:
    given = {name: getattr(args, name) for name in SERVE_FLAGS if getattr(args, name) is not None}
    flags: list[str] = []
    for name, value in given.items():
        flags += (f"--{name.replace('_', '-')}", ",".join(map(str, value)) if isinstance(value, tuple) else str(value))
    return tuple(flags)


def _check_proposers(args: argparse.Namespace, plan: Plan) -> None:
    """Raise LoadError for what cannot be done with each proposer by itself."""
    if not plan.proposers:
        raise LoadError("--proposers names no proposer; `specserve proposers` lists them.")
    if args.sweep or plan.proposer is not None:
        raise LoadError("--proposers measures each by itself; leave --sweep and --proposer out.")
    if all(mode == "plain" for mode in plan.modes):
        raise LoadError("--proposers needs a mode that speculates, like fixed:4; plain is measured anyway.")
    if plan.url is None and plan.placement == "actors":
        raise LoadError("--proposers starts a server for each, all at once, so it needs --placement inline.")
    if plan.url is not None and (plan.serve_flags or any(variant_of(one)[1] for one in plan.proposers)):
        raise LoadError("--url measures a server that is running: it was told what drafts when it was started.")


def _check_files(plan: Plan) -> None:
    """Make the report's folder and look where the JSON goes, so that a long run does not end at a wrong path."""
    try:
        if plan.report_dir is not None:
            plan.report_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LoadError(f"The report cannot be written: {error}.") from error
    if plan.json_path is not None and (plan.json_path.is_dir() or not os.access(plan.json_path.parent, os.W_OK)):
        raise LoadError(f"The results cannot be written to {str(plan.json_path)!r}.")
