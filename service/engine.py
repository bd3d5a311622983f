"""The round loop: plan, propose, score, verify, commit. Owns requests and KV block tables; does no torch work."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerFast

from .commit import commit
from .drafting import Drafting
from .errors import BadRequestError, EngineStoppedError, PromptTooLongError, RoundLostError
from .messages import Draft, ScoreBatch, ScoreRow, Verdict, VerifyBatch, VerifyRow
from .pages import OutOfPagesError, PageAllocator
from .ports import Decision, Outcome, Planner, ProposerPort, RequestView, RoundCost, RoundPort
from .requests import GenerationRequest, StepOutput
from .running import RequestStream, Running

MAX_LOST_IN_A_ROW = 20
"""A round that fails this often is not lost to a death but to a defect: the engine stops and says so."""

TIER_ORDER: Mapping[str, int] = {"priority": 0, "default": 1, "flex": 2}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of one cell. `prefill_tokens` bounds the prompt tokens of a round, so that decoding never starves."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_pages: int = 2048
    page_tokens: int = 16
    max_running: int = 32
    prefill_tokens: int = 512
    propose_timeout_s: float = 0.5


@dataclass(slots=True)
class EngineCounters:
    """What the engine has seen; only ever counted up."""

    rounds: int = 0
    requests: int = 0
    finished: int = 0
    cancelled: int = 0
    preempted: int = 0
    rounds_lost: int = 0
    proposals_missed: int = 0
    drafts_dropped: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    output_tokens: int = 0


class Engine:
    """One cell's engine. `submit` requests from the loop's own thread; each round advances every running one."""

    def __init__(
        self,
        round_port: RoundPort,
        proposers: Mapping[str, ProposerPort],
        planner: Planner,
        tokenizer: PreTrainedTokenizerFast,
        config: EngineConfig,
    ) -> None:
        self._round_port = round_port
        self._planner = planner
        self._tokenizer = tokenizer
        self.config = config
        self.counters = EngineCounters()
        self._drafting = Drafting(proposers, config, self.counters)
        self._allocator = PageAllocator(config.num_pages, config.page_tokens)
        self._waiting: list[Running] = []
        self._running: list[Running] = []
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._lost_in_a_row = 0

    @property
    def num_free_pages(self) -> int:
        """KV pages nobody holds."""
        return self._allocator.num_free

    @property
    def max_request_tokens(self) -> int:
        """Prompt and output tokens that can ever fit: the model's context or all pages, whichever is less."""
        return min(self.config.max_model_len, self.config.num_pages * self.config.page_tokens)

    @property
    def num_running(self) -> int:
        """Requests that take part in rounds."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place."""
        return len(self._waiting)

    @property
    def num_held_by_proposers(self) -> Mapping[str, int]:
        """Requests each proposer said it still holds, at its last answer."""
        return self._drafting.num_held

    @property
    def failed(self) -> bool:
        """True when the round loop ended by an error nobody expected."""
        return self._task is not None and self._task.done() and not self._task.cancelled()

    def start(self) -> None:
        """Start the round loop on the running event loop."""
        self._task = asyncio.get_running_loop().create_task(self._loop())

    async def stop(self) -> None:
        """End the loop; streams still open end with EngineStoppedError."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for running in [*self._running, *self._waiting]:
            self._end(running)
            running.stream.put(EngineStoppedError("the engine stopped before the request was finished"))

    def submit(self, request: GenerationRequest) -> RequestStream:
        """Queue `request` and return its stream. Raises BadRequestError before anything is allocated."""
        self._check(request)
        if self.failed:
            raise EngineStoppedError("the engine has stopped")
        now_s = time.monotonic()
        stream = RequestStream(request.request_id)
        self._waiting.append(Running(request, stream, now_s, list(request.prompt_token_ids)))
        self.counters.requests += 1
        self._planner.arrived(now_s)
        self._wake.set()
        return stream

    def _check(self, request: GenerationRequest) -> None:
        length = len(request.prompt_token_ids)
        if length == 0:
            raise BadRequestError("the prompt is empty", "prompt")
        if not all(0 <= token_id < self.config.vocab_size for token_id in request.prompt_token_ids):
            raise BadRequestError(f"a token id is outside 0..{self.config.vocab_size - 1}", "prompt")
        limit = self.max_request_tokens
        if request.max_tokens < 1:
            raise BadRequestError("max_tokens must be at least 1", "max_tokens")
        if length + request.max_tokens > limit:
            raise PromptTooLongError(
                f"this model's context is {limit} tokens; the prompt has {length} and max_tokens asks for "
                f"{request.max_tokens}",
                "prompt",
                "context_length_exceeded",
            )
        if request.proposer is not None and request.proposer not in self._drafting.names:
            known = ", ".join(sorted(self._drafting.names)) or "none"
            raise BadRequestError(f"no proposer {request.proposer!r} here; there is: {known}", "speculation.proposer")

    async def _loop(self) -> None:
        try:
            while True:
                self._drop_cancelled()
                self._admit()
                if not self._running:
                    await self._drafting.flush_closed(self.counters.rounds)
                    if not self._waiting:
                        self._wake.clear()
                        await self._wake.wait()
                    continue
                await self._round()
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            for running in [*self._running, *self._waiting]:
                running.stream.put(EngineStoppedError(f"the engine failed: {error}"))
            raise

    def _drop_cancelled(self) -> None:
        for running in [*self._running, *self._waiting]:
            if running.stream.cancelled:
                self._end(running)
                self.counters.cancelled += 1

    def _end(self, running: Running) -> None:
        self._allocator.release(running.table)
        self._drafting.close(running)
        for group in (self._running, self._waiting):
            if running in group:
                group.remove(running)

    def _admit(self) -> None:
        """Move waiting requests in, best tier and oldest first, while places and pages for their tokens are free."""
        self._waiting.sort(key=lambda running: (TIER_ORDER.get(running.request.tier, 1), running.arrived_s))
        while self._waiting and len(self._running) < self.config.max_running:
            running = self._waiting[0]
            needed = self._allocator.pages_for(running.committed_len + 1)
            if self._running and needed > self._allocator.num_free:
                return
            self._waiting.pop(0)
            running.admitted_s = running.admitted_s or time.monotonic()
            self._running.append(running)

    def _preempt(self) -> None:
        """Send the newest request of the lowest tier back to wait; its tokens are kept and prefilled again."""
        victim = max(self._running, key=lambda r: (TIER_ORDER.get(r.request.tier, 1), r.arrived_s))
        self._allocator.release(victim.table)
        victim.kv_len = 0
        self._running.remove(victim)
        self._waiting.append(victim)
        self.counters.preempted += 1

    async def _round(self) -> None:
        number = self.counters.rounds
        self.counters.rounds += 1
        decoding = [running for running in self._running if running.decoding]
        decisions = self._plan(decoding)
        drafts, propose_ms = await self._drafting.propose(number, decoding, decisions)
        scored = self._score_rows(drafts)
        if not scored:
            return
        score = ScoreBatch(number, tuple(row for _, row in scored))
        verify = VerifyBatch(number, tuple(_verify_row(r, drafts) for r, row in scored if row.num_sampled))
        scoring = time.perf_counter()
        try:
            verdicts = await self._round_port.run_round(score, verify)
        except RoundLostError:
            self.counters.rounds_lost += 1
            self._lost_in_a_row += 1
            if self._lost_in_a_row > MAX_LOST_IN_A_ROW:
                raise
            if await self._round_port.recover():
                for running in self._running:
                    running.kv_len = 0
            return
        score_ms = (time.perf_counter() - scoring) * 1e3
        self._lost_in_a_row = 0
        for running, row in scored:
            running.kv_len = row.start_position + len(row.token_ids)
        by_id = {verdict.request_id: verdict for verdict in verdicts.verdicts}
        outcomes = self._commit_all([r for r, row in scored if row.num_sampled], by_id, decisions, drafts)
        num_tokens = sum(len(row.token_ids) for _, row in scored)
        self._planner.learn(outcomes, RoundCost(len(scored), num_tokens, score_ms, propose_ms))

    def _plan(self, decoding: list[Running]) -> dict[str, Decision]:
        if not decoding:
            return {}
        views = [
            RequestView(
                running.request.request_id,
                running.request.tier,
                running.request.mode,
                running.request.max_draft_tokens,
                running.request.proposer,
                running.committed_len,
                min(running.remaining_tokens, self.config.max_model_len - running.committed_len),
            )
            for running in decoding
        ]
        decisions = self._planner.plan(views, self._drafting.available, time.monotonic())
        return {view.request_id: decision for view, decision in zip(views, decisions, strict=True)}

    def _score_rows(self, drafts: Mapping[str, Draft]) -> list[tuple[Running, ScoreRow]]:
        """Return the round's rows: decoding requests with their drafts, then prompt chunks within the budget."""
        scored: list[tuple[Running, ScoreRow]] = []
        budget = self.config.prefill_tokens
        for running in sorted(self._running, key=lambda r: not r.decoding):
            if running not in self._running:
                continue
            pending = running.token_ids[running.kv_len :]
            if not running.decoding:
                pending = pending[:budget]
                budget -= len(pending)
            if not pending:
                continue
            complete = running.kv_len + len(pending) == running.committed_len
            draft = drafts.get(running.request.request_id) if running.decoding else None
            token_ids = (*pending, *(draft.token_ids if draft is not None else ()))
            if not self._grow(running, running.kv_len + len(token_ids)):
                continue
            num_sampled = len(token_ids) - len(pending) + 1 if complete else 0
            table = tuple(running.table)
            row = ScoreRow(running.request.request_id, running.kv_len, token_ids, num_sampled, table)
            scored.append((running, row))
        return [(running, row) for running, row in scored if running in self._running]

    def _grow(self, running: Running, num_tokens: int) -> bool:
        """Find pages for `running`, preempting others if need be; False when it was itself sent back to wait."""
        while True:
            try:
                self._allocator.grow(running.table, num_tokens)
            except OutOfPagesError:
                self._preempt()
                if running not in self._running:
                    return False
            else:
                return True

    def _commit_all(
        self,
        sampled: list[Running],
        verdicts: Mapping[str, Verdict],
        decisions: Mapping[str, Decision],
        drafts: Mapping[str, Draft],
    ) -> list[Outcome]:
        outcomes = []
        for running in sampled:
            request_id = running.request.request_id
            verdict = verdicts[request_id]
            assert verdict.committed_len == running.committed_len
            decision = decisions.get(request_id, Decision(None, 0, "prefill"))
            num_drafted = len(drafts[request_id].token_ids) if request_id in drafts else 0
            if decision.proposer is not None and decision.gamma > 0:
                outcomes.append(
                    Outcome(
                        request_id,
                        running.request.tier,
                        decision.proposer,
                        decision.gamma,
                        num_drafted,
                        verdict.num_accepted,
                    )
                )
            if request_id in decisions:
                running.observe(decision.reason, decision.proposer, num_drafted, verdict.num_accepted)
            self.counters.draft_tokens += num_drafted
            self.counters.accepted_tokens += verdict.num_accepted
            self._commit(running, verdict)
        return outcomes

    def _commit(self, running: Running, verdict: Verdict) -> None:
        committed = commit(
            running.output,
            running.request,
            verdict.token_ids,
            verdict.logprobs,
            self._tokenizer,
            self.config.eos_token_ids,
        )
        now_s = time.monotonic()
        if running.first_token_s is None:
            running.first_token_s = now_s
        running.token_ids.extend(committed.token_ids)
        running.kv_len = min(running.kv_len, running.committed_len - 1)
        self.counters.output_tokens += len(committed.token_ids)
        finish: Literal["stop", "length"] | None = running.output.finish_reason
        summary = running.summary(now_s, self._planner.policy_version) if finish is not None else None
        running.stream.put(StepOutput(committed.text, committed.token_ids, committed.logprobs, finish, summary))
        if finish is not None:
            self._end(running)
            self.counters.finished += 1


def _verify_row(running: Running, drafts: Mapping[str, Draft]) -> VerifyRow:
    request = running.request
    draft = drafts.get(request.request_id)
    return VerifyRow(
        request.request_id,
        running.committed_len,
        request.sampling,
        draft.token_ids if draft is not None else (),
        draft.support_ids if draft is not None else None,
        draft.support_probs if draft is not None else None,
        request.num_logprobs,
    )
