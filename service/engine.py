"""The round loop: schedule, plan, propose, score, verify, commit. Does no torch work."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from transformers import PreTrainedTokenizerFast

from .commit import Output, commit
from .drafting import Drafting
from .errors import BadRequestError, EngineStoppedError, RoundLostError
from .grammar import Grammars, Matcher
from .messages import Draft, ScoreBatch, Verdict, VerifyBatch
from .ports import Decision, Outcome, Planner, ProposerPort, RoundCost, RoundPort
from .requests import GenerationRequest, StepOutput, check_request
from .running import RequestStream, Running
from .scheduler import Scheduler, Turn
from .stats import EngineStats

MAX_LOST_IN_A_ROW = 20
"""A round that fails this often is not lost to a death but to a defect: the engine stops and says so."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of one cell.

    A round holds at most `max_running` committed tokens of decoding requests, the policy's draft tokens, and
    `prefill_tokens` prompt tokens, or `prefill_tokens_busy` when somebody decodes (`scheduler.prompt_share`).
    """

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_pages: int = 2048
    page_tokens: int = 16
    max_running: int = 32
    prefill_tokens: int = 512
    prefill_tokens_busy: int = 128
    prefix_caching: bool = True
    propose_timeout_s: float = 0.5


class Engine:
    """One cell's engine. `submit` requests from the loop's own thread; each round advances every running one."""

    def __init__(
        self,
        round_port: RoundPort,
        proposers: Mapping[str, ProposerPort],
        planner: Planner,
        tokenizer: PreTrainedTokenizerFast,
        config: EngineConfig,
        grammars: Grammars | None = None,
    ) -> None:
        self._round_port = round_port
        self._planner = planner
        self._tokenizer = tokenizer
        self.grammars = grammars
        self.config = config
        self.counters = EngineStats()
        self._drafting = Drafting(proposers, config, self.counters)
        self._scheduler = Scheduler(config, self.counters)
        self._cancelled: list[str] = []
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._lost_in_a_row = 0

    @property
    def num_free_pages(self) -> int:
        """KV pages nobody holds; those that still know a prefix are among them."""
        return self._scheduler.num_free_pages

    @property
    def max_request_tokens(self) -> int:
        """Prompt and output tokens that can ever fit: the model's context or all pages, whichever is less."""
        return min(self.config.max_model_len, self.config.num_pages * self.config.page_tokens)

    @property
    def num_running(self) -> int:
        """Requests that take part in rounds."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place."""
        return self._scheduler.num_waiting

    @property
    def policy_version(self) -> int:
        """The version of the policy in force."""
        return self._planner.policy_version

    @property
    def num_held_by_proposers(self) -> Mapping[str, int]:
        """Requests each proposer said it still holds, at its last answer."""
        return self._drafting.num_held

    @property
    def proposers(self) -> Mapping[str, bool]:
        """The proposers configured here, and whether each can be asked now."""
        available = self._drafting.available
        return {name: name in available for name in sorted(self._drafting.names)}

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
        for running in self._scheduler.everyone():
            self._end(running)
            running.stream.put(EngineStoppedError("the engine stopped before the request was finished"))

    def submit(self, request: GenerationRequest) -> RequestStream:
        """Queue `request` and return its stream. Raises BadRequestError before anything is allocated."""
        check_request(request, self.config.vocab_size, self.max_request_tokens, self._drafting.names)
        if self._scheduler.find(request.request_id) is not None:
            raise BadRequestError(f"a request named {request.request_id!r} is being served", "request_id")
        if self.failed:
            raise EngineStoppedError("the engine has stopped")
        matcher = self._matcher(request.grammar)
        now_s = time.monotonic()
        stream = RequestStream(request.request_id, partial(self._cancelled.append, request.request_id))
        output = Output(matcher=matcher)
        self._scheduler.add(Running(request, stream, now_s, list(request.prompt_token_ids), output=output))
        self.counters.requests += 1
        self._planner.arrived(now_s)
        self._wake.set()
        return stream

    def _matcher(self, grammar: str | None) -> Matcher | None:
        if grammar is None:
            return None
        if self.grammars is None:
            raise BadRequestError("this engine follows no grammars", "response_format")
        return self.grammars.matcher(grammar)

    async def _loop(self) -> None:
        try:
            while True:
                self._drop_cancelled()
                self._scheduler.admit(time.monotonic())
                if not self.num_running:
                    await self._drafting.flush_closed(self.counters.rounds)
                    if not self.num_waiting:
                        self._wake.clear()
                        await self._wake.wait()
                    continue
                await self._round()
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            for running in self._scheduler.everyone():
                running.stream.put(EngineStoppedError(f"the engine failed: {error}"))
                self._planner.ended(running.request.request_id, True, None)
            raise

    def _drop_cancelled(self) -> None:
        while self._cancelled:
            running = self._scheduler.find(self._cancelled.pop())
            if running is not None and running.stream.cancelled:
                self._end(running)
                self.counters.cancelled += 1

    def _end(self, running: Running) -> None:
        self._scheduler.remove(running)
        self._drafting.close(running)

    async def _round(self) -> None:
        number = self.counters.rounds
        self.counters.rounds += 1
        turns = self._scheduler.schedule()
        decoding = [turn.running for turn in turns if turn.decoding]
        decisions = self._plan(decoding)
        drafts, propose_ms = await self._drafting.propose(number, decoding, decisions)
        rows = tuple(self._scheduler.row(turn, drafts.get(turn.running.request.request_id)) for turn in turns)
        sampled = [turn.running for turn in turns if turn.sampled]
        verify = VerifyBatch(
            number,
            tuple(r.verify_row(drafts.get(r.request.request_id), self.config.eos_token_ids) for r in sampled),
        )
        num_prefill_tokens = sum(turn.end - turn.running.kv_len for turn in turns if not turn.decoding)
        scoring = time.perf_counter()
        try:
            verdicts = await self._round_port.run_round(ScoreBatch(number, rows), verify)
        except RoundLostError as error:
            await self._recover(turns, error)
            return
        score_ms = (time.perf_counter() - scoring) * 1e3
        self._lost_in_a_row = 0
        for turn in turns:
            if not turn.sampled:
                self._scheduler.settle(turn.running, turn.end)
        by_id = {verdict.request_id: verdict for verdict in verdicts.verdicts}
        outcomes = self._commit_all(sampled, by_id, decisions, drafts)
        num_tokens = sum(len(row.token_ids) for row in rows)
        self._planner.learn(outcomes, RoundCost(len(rows), num_tokens, score_ms, propose_ms, num_prefill_tokens))

    async def _recover(self, turns: list[Turn], error: RoundLostError) -> None:
        """Wait for the parts of a lost round. Nothing was committed, so the next round simply does it again."""
        self.counters.rounds_lost += 1
        self._lost_in_a_row += 1
        if self._lost_in_a_row > MAX_LOST_IN_A_ROW:
            raise error
        for turn in turns:
            self._scheduler.settle(turn.running, turn.running.kv_len, turn.running.moved_from)
        if await self._round_port.recover():
            self._scheduler.forget_kv()

    def _plan(self, decoding: list[Running]) -> dict[str, Decision]:
        if not decoding:
            return {}
        views = [running.view(self._room(running)) for running in decoding]
        decisions = self._planner.plan(views, self._drafting.available, time.monotonic())
        return {
            running.request.request_id: self._granted(running, decision)
            for running, decision in zip(decoding, decisions, strict=True)
        }

    def _room(self, running: Running) -> int:
        """Return how many tokens may still be committed: up to the end of the output and of the context."""
        return min(running.remaining_tokens, self.config.max_model_len - running.committed_len)

    def _granted(self, running: Running, decision: Decision) -> Decision:
        """Return `decision` with gamma cut to the room, of which the round's own token takes one, and to free pages."""
        if decision.proposer is None or decision.gamma < 1:
            return decision
        gamma = min(decision.gamma, self._room(running) - 1)
        if gamma < 1:
            return replace(decision, proposer=None, gamma=0, reason="end_of_output")
        gamma = self._scheduler.grant(running, gamma)
        if gamma == 0:
            return replace(decision, proposer=None, gamma=0, reason="no_free_pages")
        return replace(decision, gamma=gamma)

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
            draft = drafts.get(request_id)
            num_drafted = len(draft.token_ids) if draft is not None else 0
            if decision.proposer is not None and decision.gamma > 0:
                outcomes.append(
                    Outcome(
                        request_id,
                        running.request.tier,
                        decision.proposer,
                        decision.gamma,
                        draft.depth if draft is not None else 0,
                        verdict.num_accepted,
                    )
                )
            if request_id in decisions:
                running.observe(decision.reason, decision.proposer, num_drafted, verdict.num_accepted)
                version = self._planner.version_of(request_id)
                self.counters.decide(running.request.tier, decision, version, num_drafted, verdict.num_accepted)
            self._commit(running, verdict, draft)
        return outcomes

    def _commit(self, running: Running, verdict: Verdict, draft: Draft | None) -> None:
        committed = commit(
            running.output,
            running.request,
            verdict.token_ids,
            verdict.logprobs,
            self._tokenizer,
            self.config.eos_token_ids,
        )
        now_s = time.monotonic()
        since_s = None if running.last_token_s is None else now_s - running.last_token_s
        self.counters.commit(running.request.tier, len(committed.token_ids), since_s)
        running.last_token_s = now_s
        if running.first_token_s is None:
            running.first_token_s = now_s
        running.token_ids.extend(committed.token_ids)
        left_at = draft.left_at(committed.token_ids) if draft is not None else ()
        self._scheduler.settle(running, running.committed_len - 1, left_at)
        finish: Literal["stop", "length"] | None = running.output.finish_reason
        summary = None
        if finish is not None:
            summary = running.summary(now_s, self._planner.version_of(running.request.request_id))
            self.counters.end(summary, finish, self._planner.tpot_slo_ms(summary.tier))
        shown = (committed.text, committed.token_ids, committed.logprobs)
        num_drafted = len(draft.token_ids) if draft is not None else 0
        running.stream.put(StepOutput(*shown, finish, summary, num_drafted, verdict.num_accepted))
        if finish is not None:
            self._end(running)
            self._planner.ended(running.request.request_id, False, running.tpot_ms(now_s))
