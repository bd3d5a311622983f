"""What a bench run does, from its command line; wrong wishes are refused before anything is started."""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from .client import speculation
from .errors import LoadError
from .prompts import WORKLOADS, WorkloadName, workload_name
from .server import Placement

SWEEP_CONCURRENCY = (1, 4, 16)
SWEEP_MODES = ("plain", "fixed:2", "fixed:4", "fixed:8", "adaptive")


@dataclass(frozen=True, slots=True)
class Plan:
    """What a bench run does. Without `url` it serves `model` (None: the embedded one) itself."""

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
    against_transformers: bool = False
    json_path: Path | None = None
    report_dir: Path | None = None
    strict: bool = False

    @property
    def greedy(self) -> bool:
        """True when texts of different modes must be equal."""
        return self.temperature == 0

    def num_requests(self, concurrency: int) -> int:
        """Requests of one pass: every prompt, and no fewer than are to be in flight."""
        return max(self.num_prompts, concurrency)


def plan_from(args: argparse.Namespace) -> Plan:
    """Return the plan that the command line asks for. Raises LoadError for a mode, workload or file that cannot be."""
    usual = Plan(workloads=WORKLOADS, concurrency=SWEEP_CONCURRENCY, modes=SWEEP_MODES) if args.sweep else Plan()
    plan = Plan(
        model=args.model,
        url=args.url,
        placement=args.placement,
        workloads=tuple(dict.fromkeys(workload_name(name) for name in args.workloads or usual.workloads)),
        concurrency=tuple(dict.fromkeys(args.concurrency or usual.concurrency)),
        modes=tuple(dict.fromkeys(args.modes or usual.modes)),
        repeats=args.repeats,
        num_prompts=args.prompts,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        proposer=args.proposer,
        against_transformers=args.against == "transformers",
        json_path=None if args.json is None else Path(args.json),
        report_dir=None if args.report is None else Path(args.report),
        strict=args.check,
    )
    for mode in plan.modes:
        speculation(mode)
    _check_files(plan)
    return plan


def _check_files(plan: Plan) -> None:
    """Make the report's folder and look where the JSON goes, so that a long run does not end at a wrong path."""
    try:
        if plan.report_dir is not None:
            plan.report_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LoadError(f"The report cannot be written: {error}.") from error
    if plan.json_path is not None and (plan.json_path.is_dir() or not os.access(plan.json_path.parent, os.W_OK)):
        raise LoadError(f"The results cannot be written to {str(plan.json_path)!r}.")
