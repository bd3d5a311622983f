"""The engine's dealings with proposers: one message each and round, a deadline, and no trust in what comes back."""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from .errors import ProposerUnavailableError
from .grammar import Matcher
from .messages import PREDICTION, Draft, DraftBatch, ProposeBatch, ProposeRow
from .ports import CommittedOutput, Decision, Learner, ProposerPort
from .running import Running
from .trees import children, is_chain, is_tree, paths


class DraftingLimits(Protocol):
    """What of the engine's configuration matters here."""

    @property
    def propose_timeout_s(self) -> float: ...
    @property
    def vocab_size(self) -> int: ...


class DraftingCounters(Protocol):
    """The engine's counters that are counted up here."""

    missed: Counter[str]
    dropped: Counter[str]


class Drafting:
    """Calls proposers and checks their answers. Owns who must be told that a request is closed."""

    def __init__(self, ports: Mapping[str, ProposerPort], limits: DraftingLimits, counters: DraftingCounters) -> None:
        self._ports = dict(ports)
        self._limits = limits
        self._counters = counters
        self._closed: dict[str, list[str]] = {name: [] for name in ports}
        self._learners = {name: port for name, port in ports.items() if isinstance(port, Learner)}
        self.num_held: dict[str, int] = {}

    @property
    def names(self) -> frozenset[str]:
        """Every proposer configured here."""
        return frozenset(self._ports)

    @property
    def available(self) -> frozenset[str]:
        """Proposers that can be asked now."""
        return frozenset(name for name, port in self._ports.items() if port.available)

    def close(self, running: Running) -> None:
        """Remember to tell every proposer that may hold `running` that it is over; let those learn that want to."""
        for name in running.known:
            self._closed[name].append(running.request.request_id)
        for name, learner in self._learners.items():
            try:
                learner.observe(CommittedOutput(running.request.cache_salt, tuple(running.output.token_ids)))
            except ProposerUnavailableError:
                self._counters.missed[name] += 1

    async def propose(
        self, round_number: int, decoding: Sequence[Running], decisions: Mapping[str, Decision]
    ) -> tuple[dict[str, Draft], tuple[tuple[str, int, float], ...]]:
        """Return the usable drafts by request id, and per proposer called its largest gamma and milliseconds."""
        rows: dict[str, list[tuple[Running, ProposeRow]]] = {}
        for running in decoding:
            decision = decisions[running.request.request_id]
            if decision.proposer is None or decision.gamma < 1:
                continue
            port = self._ports[decision.proposer]
            rows.setdefault(decision.proposer, []).append((running, _row(running, port, decision.gamma)))
        names = [name for name in self._ports if name in rows or self._closed[name]]
        answers = await asyncio.gather(*(self._ask(round_number, name, rows.get(name, [])) for name in names))
        drafts: dict[str, Draft] = {}
        spent = []
        for name, (found, elapsed_ms) in zip(names, answers, strict=True):
            drafts.update(found)
            if name in rows:
                spent.append((name, max(row.gamma for _, row in rows[name]), elapsed_ms))
        return drafts, tuple(spent)

    async def flush_closed(self, round_number: int) -> None:
        """Tell proposers what is closed when no round will."""
        await self.propose(round_number, (), {})

    async def _ask(
        self, round_number: int, name: str, rows: list[tuple[Running, ProposeRow]]
    ) -> tuple[dict[str, Draft], float]:
        port = self._ports[name]
        closed = tuple(self._closed[name])
        batch = ProposeBatch(round_number, name, tuple(row for _, row in rows), closed)
        generation = port.generation
        started = time.perf_counter()
        if not port.available:
            self._closed[name].clear()
            self.num_held.pop(name, None)
            return {}, 0.0
        try:
            answer = await port.propose(batch, self._limits.propose_timeout_s)
        except ProposerUnavailableError:
            self._counters.missed[name] += 1
            for running, _ in rows:
                running.known[name] = (generation, 0)
            return {}, (time.perf_counter() - started) * 1e3
        if answer.round != round_number:
            self._counters.dropped[name] += 1
            answer = DraftBatch(round_number, (), answer.num_held_requests)
        del self._closed[name][: len(closed)]
        self.num_held[name] = answer.num_held_requests
        return self._accept(answer, generation, name, rows), (time.perf_counter() - started) * 1e3

    def _accept(
        self, answer: DraftBatch, generation: int, name: str, rows: list[tuple[Running, ProposeRow]]
    ) -> dict[str, Draft]:
        """Return the drafts that answer what was asked; anything stale or malformed is dropped and counted."""
        found = {draft.request_id: draft for draft in answer.drafts}
        drafts = {}
        for running, row in rows:
            draft = found.get(row.request_id)
            if draft is None or draft.committed_len != row.committed_len:
                self._counters.dropped[name] += draft is not None
                running.known[name] = (generation, 0)
                continue
            running.known[name] = (generation, row.committed_len)
            if not well_formed(draft, row, self._limits.vocab_size):
                self._counters.dropped[name] += 1
                continue
            draft = straightened(within_grammar(draft, running.output.matcher))
            if draft.token_ids:
                drafts[row.request_id] = draft
        return drafts


def _row(running: Running, port: ProposerPort, gamma: int) -> ProposeRow:
    generation, known_len = running.known.get(port.name, (port.generation, 0))
    known_len = known_len if generation == port.generation else 0
    running.known[port.name] = (port.generation, known_len)
    new_token_ids = tuple(running.token_ids[known_len:])
    request = running.request
    wanted = port.name == PREDICTION and known_len == 0
    return ProposeRow(
        request.request_id,
        running.committed_len,
        known_len,
        new_token_ids,
        gamma,
        request.sampling,
        request.prediction if wanted else None,
        running.pages() if port.needs_pages else (),
        running.moved_from if port.needs_pages else (),
        request.cache_salt,
    )


def straightened(draft: Draft) -> Draft:
    """Return `draft`, without parents where they say a chain."""
    return replace(draft, parents=None) if draft.parents is not None and is_chain(draft.parents) else draft


def within_grammar(draft: Draft, matcher: Matcher | None) -> Draft:
    """Return `draft` up to where the output's grammar forbids a token; what follows could never be accepted.

    That token itself stays when it was sampled for a ratio test: its rejection leaves a residual, and a draft whose
    length depended on it would bias the output. Otherwise it goes: nothing of the output depends on a walk's length.
    """
    if matcher is None:
        return draft
    sampled = draft.support_ids is not None
    if draft.parents is not None:
        return draft if sampled else _pruned(draft, draft.parents, matcher)
    length = min(matcher.num_allowed(draft.token_ids) + sampled, len(draft.token_ids))
    if length == len(draft.token_ids):
        return draft
    ids, probs = draft.support_ids, draft.support_probs
    return replace(
        draft,
        token_ids=draft.token_ids[:length],
        support_ids=None if ids is None else ids[:length],
        support_probs=None if probs is None else probs[:length],
    )


def _pruned(draft: Draft, parents: Sequence[int], matcher: Matcher) -> Draft:
    """Return a tree without the nodes that the grammar forbids and what hangs on them."""
    kept = {0: 0}
    for node, path in enumerate(paths(parents)):
        if node and path[-2] in kept:
            tokens = [draft.token_ids[one - 1] for one in path[1:]]
            if matcher.num_allowed(tokens) == len(tokens):
                kept[node] = len(kept)
    nodes = [node for node in kept if node]
    return replace(
        draft,
        token_ids=tuple(draft.token_ids[node - 1] for node in nodes),
        parents=tuple(kept[parents[node - 1]] for node in nodes),
    )


def well_formed(draft: Draft, row: ProposeRow, vocab_size: int) -> bool:
    """Return whether a draft may be scored: right size, real tokens, a tree if it is none that is a chain, and
    probabilities that are a distribution, for siblings one and the same."""
    gamma = len(draft.token_ids)
    if gamma > row.gamma or not all(0 <= token_id < vocab_size for token_id in draft.token_ids):
        return False
    if draft.parents is not None and not is_tree(draft.parents, draft.token_ids):
        return False
    ids, probs = draft.support_ids, draft.support_probs
    if ids is None or probs is None:
        return ids is None and probs is None
    if row.sampling.greedy or row.sampling.acceptance == "coupled":
        return False
    if ids.shape != probs.shape or ids.ndim != 2 or len(ids) != gamma:
        return False
    if not (np.isfinite(probs).all() and (probs >= 0).all() and np.allclose(probs.sum(1), 1.0, atol=1e-4)):
        return False
    for group in children(draft.parents) if draft.parents is not None else ():
        first, rest = [node - 1 for node in group[:1]], [node - 1 for node in group[1:]]
        if not ((ids[rest] == ids[first]).all() and (probs[rest] == probs[first]).all()):
            return False
    chosen = (ids == np.array(draft.token_ids).reshape(gamma, 1)) & (probs > 0)
    return bool((ids >= 0).all() and (ids < vocab_size).all() and chosen.any(1).all())
