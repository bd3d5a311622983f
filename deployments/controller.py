"""The controller: owns what is desired, tells the cells, hears from them. Never in the path of a token."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from specserve.service.errors import BadRequestError, SpecserveError, StoreUnavailableError, VersionConflictError

from .api.backend import CellSnapshot
from .control import overrides_in_force, snapshot_of
from .exchange import EXCHANGE_EVERY_S, Question, Reply, Report
from .guard import Tally, verdict
from .lastgood import keep, kept
from .policystore import Desired, Note, PolicyStore
from .rollout import Canary, Override
from .snapshot import Snapshot
from .usage import SharedUsage

LOG = logging.getLogger(__name__)
LIVE_S = 5.0
ASK_S = 3.0
_MAX_CELLS = 256
T = TypeVar("T")


@dataclass(slots=True)
class _Cell:
    """The last report of a cell, when it came, and what its requests had got when the canary began."""

    report: Report
    heard_s: float
    start: Mapping[int, Tally]


class Controller:
    """The one owner of the policy. `clock` gives Unix time.

    Every change goes through the store first; while that cannot be written, nothing changes but what must: overrides
    expire, and a canary that its guard ends does end.
    """

    def __init__(self, store: PolicyStore, clock: Callable[[], float] = time.time) -> None:
        """Raises StoreUnavailableError when neither the store nor its last good policy can be read."""
        self.store = store
        self.store_error: str | None = None
        self._clock = clock
        self._lock = asyncio.Lock()
        self._changed = asyncio.Event()
        self._cells: dict[str, _Cell] = {}
        self._questions: dict[int, tuple[Question, dict[str, Any], set[str]]] = {}
        self._num_questions = 0
        self._usage = SharedUsage()
        self._watched: Canary | None = None
        self._endings: set[asyncio.Future[None]] = set()
        try:
            self.desired = store.desired()
            snapshot_of(self.desired, clock())
            self._keep()
        except (StoreUnavailableError, ValueError) as error:
            last = kept(store.path)
            if last is None:
                raise
            self.desired, self.store_error = last, str(error.args[0])
            LOG.error("the last good policy stays in force: %s", self.store_error)

    def now_s(self) -> float:
        """Return the Unix time."""
        return self._clock()

    @property
    def snapshot(self) -> Snapshot:
        """What governs the cells now."""
        return snapshot_of(self.desired, self._clock())

    @property
    def overrides(self) -> tuple[Override, ...]:
        """The overrides in force."""
        return overrides_in_force(self.desired, self._clock())

    async def exchange(self, cell_id: str, report: Report) -> Reply:
        """Take in a cell's report; return what is new to it, at once or when there is something."""
        self._hear(cell_id, report)
        used = self._usage.exchange(cell_id, report.used, time.monotonic())
        self._watch_canary()
        reply = self._news(cell_id, report)
        if reply.snapshot is None and not reply.questions:
            with suppress(TimeoutError):
                async with asyncio.timeout(EXCHANGE_EVERY_S):
                    await self._changed.wait()
            reply = self._news(cell_id, report)
        return replace(reply, used_elsewhere=used)

    async def answer(self, cell_id: str, question_id: int, content: object) -> None:
        """Take in a cell's answer to a question that is still open."""
        if question_id in self._questions:
            self._questions[question_id][1][cell_id] = content
            self._wake()

    async def ask(self, about: Literal["decisions", "rounds"], **what: Any) -> dict[str, Any]:
        """Return the answers of the live cells by cell; one that says nothing for `ASK_S` is left out."""
        self._num_questions += 1
        question, waited = Question(self._num_questions, about, **what), set(self._live())
        answers: dict[str, Any] = {}
        self._questions[question.question_id] = (question, answers, waited)
        self._wake()
        give_up_s = time.monotonic() + ASK_S
        try:
            while waited - answers.keys() and (left := give_up_s - time.monotonic()) > 0.0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await self._changed.wait()
        finally:
            del self._questions[question.question_id]
        return answers

    def metrics(self, cell_id: str) -> list[CellSnapshot]:
        """Return what the live cells but this one last said of themselves."""
        reports = {name: self._cells[name].report for name in self._live() if name != cell_id}
        return [report.metrics for report in reports.values() if report.metrics is not None]

    async def change(self, action: str, note: Note, work: Callable[[PolicyStore], T]) -> T:
        """Do `work` on the store, make what it says the cells' at once, and return its result.

        What is refused is entered into the audit and raised.
        """
        async with self._lock:
            try:
                result = await asyncio.to_thread(work, self.store)
                desired = await asyncio.to_thread(self.store.desired)
            except (VersionConflictError, BadRequestError) as error:
                await self.refuse(action, note, error)
                raise
            except StoreUnavailableError as error:
                self.store_error = error.message
                raise
            self._follow(desired)
            await asyncio.to_thread(self._keep)
            return result

    async def refuse(self, action: str, note: Note, error: SpecserveError) -> None:
        """Enter into the audit that something was asked for and refused, where that can be written."""
        with suppress(StoreUnavailableError):
            await asyncio.to_thread(self.store.refuse, action, note, error.message)

    def state(self) -> dict[str, Any]:
        """Return what governs, what the store says, and what is known of every cell."""
        revision, rollout = self.snapshot.revision, self.desired.rollout
        return {
            "policy": {"version": rollout.active, "name": self.desired.documents[rollout.active]["name"]},
            "revision": revision,
            "canary": rollout.canary,
            "canary_requests": self._canary_state(rollout.canary),
            "shadow": rollout.shadow,
            "overrides": self.overrides,
            "store": {"path": str(self.store.path), "writable": self.store_error is None, "error": self.store_error},
            "cells": {cell_id: self._cell_state(cell, revision) for cell_id, cell in self._cells.items()},
        }

    def _cell_state(self, cell: _Cell, revision: object) -> dict[str, Any]:
        age_s = time.monotonic() - cell.heard_s
        return {
            "age_s": round(age_s, 3),
            "live": age_s < LIVE_S,
            "up_to_date": cell.report.revision == revision,
            "shadow": cell.report.shadow,
            **cell.report.cell,
        }

    def _canary_state(self, canary: Canary | None) -> dict[str, Any] | None:
        if canary is None:
            return None
        tally = self._since_start(canary.version)
        return {
            "finished": tally.finished,
            "failed": tally.failed,
            "tpot_p95_ms": tally.tpot_p95_ms,
            "acceptance_rate": tally.accepted / tally.tested if tally.tested else None,
        }

    def _news(self, cell_id: str, report: Report) -> Reply:
        snapshot = self.snapshot
        open_questions = tuple(
            question
            for question, answers, waited in self._questions.values()
            if cell_id in waited and cell_id not in answers
        )
        return Reply(snapshot if snapshot.revision != report.revision else None, open_questions)

    def _hear(self, cell_id: str, report: Report) -> None:
        known = self._cells.pop(cell_id, None)
        self._cells[cell_id] = _Cell(report, time.monotonic(), {} if known is None else known.start)
        while len(self._cells) > _MAX_CELLS:
            del self._cells[next(iter(self._cells))]

    def _live(self) -> list[str]:
        now_s = time.monotonic()
        return [cell_id for cell_id, cell in self._cells.items() if now_s - cell.heard_s < LIVE_S]

    def _watch_canary(self) -> None:
        """End the canary when its guard says so."""
        canary = self.desired.rollout.canary
        if self._watched != canary:
            self._watched = canary
            for cell in self._cells.values():
                cell.start = cell.report.tallies
        if canary is None:
            return
        active = self._since_start(self.desired.rollout.active)
        why = verdict(canary.guard, self._since_start(canary.version), active)
        if why is None:
            return
        revision, note = self.desired.revision, Note(self._clock(), "guard", why)

        def end(store: PolicyStore) -> None:
            store.roll_out(lambda now: replace(now, canary=None) if now.canary == canary else now, "rollback", note)

        LOG.warning("the canary of version %d ends: %s", canary.version, why)
        # Before the store is asked: a bad canary ends at once, and even where that cannot be stored.
        self._follow(replace(self.desired, revision=-abs(revision), rollout=replace(self.desired.rollout, canary=None)))
        # A task of its own: a cell that no longer waits for a slow store must not leave the change half done.
        ending = asyncio.ensure_future(self._store_end(note, end))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    async def _store_end(self, note: Note, end: Callable[[PolicyStore], None]) -> None:
        try:
            await self.change("rollback", note, end)
        except StoreUnavailableError as error:
            LOG.error("the end of the canary is not stored: %s", error.message)

    def _since_start(self, version: int) -> Tally:
        """Return what all cells' requests of a version got since the canary began."""
        total = Tally()
        for cell in self._cells.values():
            tally = cell.report.tallies.get(version)
            if tally is not None:
                total = total.plus(tally.since(cell.start.get(version, Tally())))
        return total

    def _follow(self, desired: Desired) -> None:
        self.desired = desired
        self._wake()

    def _wake(self) -> None:
        """Let everyone who waits look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _keep(self) -> None:
        self.store_error = None
        try:
            keep(self.store.path, self.desired)
        except OSError as error:
            self.store_error = f"the last good policy cannot be kept: {error.strerror}"
            LOG.error(self.store_error)
