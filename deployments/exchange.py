"""What a cell and the controller say to each other, and the cell's side of it."""

import asyncio
import copy
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from .api.backend import CellSnapshot
from .guard import Tally
from .planning import PolicyPlanner
from .recorder import ShadowTally
from .snapshot import Revision, Snapshot
from .usage import KeyUse

LOG = logging.getLogger(__name__)
EXCHANGE_EVERY_S = 0.5
ANSWER_WITHIN_S = 5.0


@dataclass(frozen=True, slots=True)
class Report:
    """A cell's counters and gauges, the revision it follows, and what its requests got by policy version.

    `metrics` are what other cells show of it to whoever scrapes them; None where there is one cell only. `used` is what
    each API key uses here of its limits.
    """

    cell: Mapping[str, Any]
    revision: Revision | None
    tallies: Mapping[int, Tally] = field(default_factory=dict)
    shadow: ShadowTally | None = None
    metrics: CellSnapshot | None = None
    used: Mapping[str, KeyUse] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Question:
    """What the controller wants to know of every cell: a request's decisions, or its last `num_rounds` rounds."""

    question_id: int
    about: Literal["decisions", "rounds"]
    request_id: str = ""
    num_rounds: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """The controller's part: a snapshot if the cell follows another one, questions, and what API keys use elsewhere."""

    snapshot: Snapshot | None
    questions: tuple[Question, ...] = ()
    used_elsewhere: Mapping[str, KeyUse] = field(default_factory=dict)


class QuotaPort(Protocol):
    """What a cell tells and hears about the limits of its API keys."""

    def used(self) -> Mapping[str, KeyUse]:
        """Return what each key uses here."""
        ...

    def share(self, others: Mapping[str, KeyUse]) -> None:
        """Count what the other cells use."""
        ...


class ControllerPort(Protocol):
    """Reaches the controller, wherever it lives."""

    async def exchange(self, cell_id: str, report: Report) -> Reply:
        """Return as soon as there is something new, else after `EXCHANGE_EVERY_S`."""
        ...

    async def answer(self, cell_id: str, question_id: int, content: object) -> None:
        """Take in a cell's answer."""
        ...


class Follower:
    """Keeps one cell's planner at what the controller says; without the controller the last snapshot stays."""

    def __init__(
        self,
        cell_id: str,
        planner: PolicyPlanner,
        describe: Callable[[], Mapping[str, Any]],
        controller: ControllerPort,
        clock: Callable[[], float] = time.monotonic,
        metrics: Callable[[], CellSnapshot | None] = lambda: None,
        quotas: QuotaPort | None = None,
    ) -> None:
        self.cell_id = cell_id
        self._planner = planner
        self._describe = describe
        self._controller = controller
        self._clock = clock
        self._metrics = metrics
        self._quotas = quotas
        self._lost = False

    async def run(self) -> None:
        """Exchange for ever."""
        while True:
            if not await self.once():
                await asyncio.sleep(EXCHANGE_EVERY_S)

    async def once(self) -> bool:
        """Exchange once and return whether the controller answered."""
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):  # not wait_for, which may lose a cancellation in Python 3.11
                reply = await self._controller.exchange(self.cell_id, self._report())
            if reply.snapshot is not None:
                self._planner.follow(reply.snapshot, self._clock())
            if self._quotas is not None:
                self._quotas.share(reply.used_elsewhere)
            for question in reply.questions:
                content = self._content(question)
                await self._controller.answer(self.cell_id, question.question_id, content)
        except Exception as error:  # the controller is never in the path of a token, so nothing it does ends a cell
            if not self._lost:
                version = self._planner.policy_version
                LOG.warning("the controller does not answer; policy %d stays: %r", version, error)
            self._lost = True
            return False
        self._lost = False
        return True

    def _report(self) -> Report:
        planner = self._planner
        revision = None if planner.snapshot is None else planner.snapshot.revision
        cell = {**self._describe(), **planner.gauges(self._clock())}
        tallies, shadow = copy.deepcopy(planner.tallies), copy.deepcopy(planner.shadow)
        used = {} if self._quotas is None else self._quotas.used()
        return Report(cell, revision, tallies, shadow, self._metrics(), used)

    def _content(self, question: Question) -> object:
        if question.about == "decisions":
            return self._planner.explain(question.request_id)
        return self._planner.recording(question.num_rounds)
