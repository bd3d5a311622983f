"""Learning: what the drafts of a round and its milliseconds say about the next."""

from .acceptance import History
from .state import Memory, PlanState, RoundResult
from .strengths import EASE_STEPS, Shared

_SHIFT = 1.0
_ORDINARY_TOKENS = 12


class _Pair:
    """What one proposer did in one tier this round."""

    __slots__ = ("num_accepted", "num_asked", "num_drafted", "num_drafts", "num_tested", "shared")

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.num_drafts = self.num_asked = self.num_drafted = self.num_tested = self.num_accepted = 0


def learn_round(result: RoundResult, state: PlanState) -> PlanState:
    """Return the state, updated in place, after the outcome and cost of one round. Cost: O(drafts)."""
    pairs: dict[tuple[str, str], _Pair] = {}
    memories, active_rounds = state.memories, state.active_rounds
    for draft in result.drafts:
        proposer, asked = draft.proposer, draft.num_asked
        drafted = min(draft.num_drafted, asked)
        pair = pairs.get((proposer, draft.tier))
        if pair is None:
            pair = pairs[proposer, draft.tier] = _Pair(state.acceptance.of(proposer, draft.tier))
        accepted = min(draft.num_accepted, drafted)
        tested = accepted + 1 if accepted < drafted else drafted
        pair.num_drafts += 1
        pair.num_asked += asked
        pair.num_drafted += drafted
        pair.num_tested += tested
        pair.num_accepted += accepted
        memory = memories.get(draft.request_id)
        if memory is None:
            memory = memories[draft.request_id] = Memory(seen_round=state.round_number)
        history = memory.histories.get(proposer)
        if history is None:
            history = memory.histories[proposer] = History()
        standing = memory.ease.standing(history)
        curve = pair.shared.curve(standing, asked)
        pair.shared.tally(curve, standing / EASE_STEPS, asked, drafted, tested, accepted)
        memory.ease.learn(history, pair.shared, curve, drafted, tested, accepted, active_rounds)
        if abs(memory.ease.rating.value - memory.chosen_ease) > _SHIFT:
            memory.review_round = 0
    _learn_costs(result, state, pairs)
    for (_, tier), pair in pairs.items():
        pair.shared.settle()
        state.acceptance.count(tier, pair.num_tested, pair.num_accepted)
    drafted, accepted = sum(p.num_drafted for p in pairs.values()), sum(p.num_accepted for p in pairs.values())
    state.switch.heard(drafted, accepted, state.round_number)
    return state


def _learn_costs(result: RoundResult, state: PlanState, pairs: dict[tuple[str, str], _Pair]) -> None:
    """Learn what the round took; the forward only when it held no prompt tokens."""
    if result.num_tokens > 0 and result.num_prefill_tokens == 0:
        draft_tokens = result.num_tokens - result.num_requests
        state.costs.score.observe(result.num_requests, draft_tokens, result.score_ms)
        if draft_tokens == 0:
            state.plain_attempts = 0
            state.plain_round = state.round_number
    for proposer, gamma, ms in result.propose_ms:
        users = [pair for (name, _), pair in pairs.items() if name == proposer]
        num_asked = sum(pair.num_asked for pair in users) or gamma
        ordinary = _ORDINARY_TOKENS * sum(pair.num_drafts for pair in users)
        behind = state.behind.get(proposer, 0)
        state.costs.draft(proposer).observe(gamma, num_asked, ms, behind if behind > ordinary else 0)
