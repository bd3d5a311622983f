"""Proposers that users bring: a class by its import path, and a port that does not depend on its good manners.

A class needs a `name`, a constructor without arguments, and `propose`; `updated_tokens` keeps the committed tokens:

    from specserve.service.messages import Draft, DraftBatch, ProposeBatch
    from specserve.service.proposers.held import updated_tokens

    class Echo:
        '''Guesses that the last token comes again.'''

        name = "echo"

        def __init__(self) -> None:
            self._held: dict[str, list[int]] = {}

        def propose(self, batch: ProposeBatch) -> DraftBatch:
            for request_id in batch.closed:
                self._held.pop(request_id, None)
            drafts = []
            for row in batch.rows:
                tokens = updated_tokens(self._held.get(row.request_id, []), row)
                if tokens is None:
                    self._held.pop(row.request_id, None)
                    continue
                self._held[row.request_id] = tokens
                drafts.append(Draft(row.request_id, row.committed_len, (tokens[-1],) * row.gamma))
            return DraftBatch(batch.round, tuple(drafts), len(self._held))

A draft may be a tree: `Draft.parents` says which token each one follows (`trees.py`), `row.gamma` bounds their number.
`specserve serve --proposers draft,my.module:Echo` offers it; a policy that lists `echo` among its proposers, or a
request that names it, uses it. What it answers can cost speed and never change an output.
"""

import asyncio
import importlib
import threading

from .errors import BadRequestError, ProposerUnavailableError
from .messages import Draft, DraftBatch, ProposeBatch
from .ports import Proposer


def load_plugin(path: str) -> Proposer:
    """Return a new proposer of the class at `module:Class`. Raises BadRequestError naming what is wrong with it."""
    module, _, name = path.partition(":")
    try:
        made: Proposer = getattr(importlib.import_module(module), name)()
    except Exception as error:
        raise BadRequestError(f"{path} cannot be made: {type(error).__name__}: {error}", "proposers") from error
    if not isinstance(getattr(made, "name", None), str) or not callable(getattr(made, "propose", None)):
        raise BadRequestError(f"{path} is no proposer: it needs a name and a method propose", "proposers")
    return made


class PluginPort:
    """Calls a plug-in on a thread of its own, waits no longer than the deadline, and rebuilds what it answers.

    While a call is late there is no other. Probabilities are taken out of drafts unless the plug-in is `trusted`:
    without them a draft is checked by sampling from the target alone, which is exact whatever was drafted and how.
    """

    needs_pages = False

    def __init__(self, proposer: Proposer, trusted: bool = False) -> None:
        self._proposer = proposer
        self._trusted = trusted
        self._call: asyncio.Future[object] | None = None
        self.name = proposer.name
        self.generation = 0

    @property
    def available(self) -> bool:
        """False while a late call is still running."""
        return self._call is None or self._call.done()

    async def propose(self, batch: ProposeBatch, timeout_s: float) -> DraftBatch:
        """Return the drafts as far as they are drafts. Raises ProposerUnavailableError when there is no answer."""
        if not self.available:
            raise ProposerUnavailableError(f"{self.name} is still busy with an earlier round")
        call = self._call = asyncio.get_running_loop().create_future()
        threading.Thread(target=self._run, args=(batch, call), name=self.name, daemon=True).start()
        done, _ = await asyncio.wait((call,), timeout=timeout_s)
        if not done:
            self.generation += 1
            raise ProposerUnavailableError(f"{self.name} is late")
        answer = call.result()
        if isinstance(answer, BaseException):
            raise ProposerUnavailableError(f"{self.name} failed: {answer!r}") from answer
        try:
            return self._rebuilt(answer, batch)
        except Exception as error:
            raise ProposerUnavailableError(f"{self.name} answered nonsense: {error!r}") from error

    def _run(self, batch: ProposeBatch, call: "asyncio.Future[object]") -> None:
        answer: object
        try:
            answer = self._proposer.propose(batch)
        except BaseException as error:
            answer = error
        loop = call.get_loop()
        if not loop.is_closed():
            loop.call_soon_threadsafe(_settle, call, answer)

    def _rebuilt(self, answer: object, batch: ProposeBatch) -> DraftBatch:
        if not isinstance(answer, DraftBatch):
            raise TypeError(f"{type(answer).__name__} is no DraftBatch")
        longest = {row.request_id: row.gamma for row in batch.rows}
        fitting = [draft for draft in answer.drafts if len(draft.token_ids) <= longest[draft.request_id]]
        drafts = tuple(self._hint(draft) for draft in fitting)
        return DraftBatch(int(answer.round), drafts, int(answer.num_held_requests))

    def _hint(self, draft: Draft) -> Draft:
        token_ids = tuple(int(token) for token in draft.token_ids)
        supports = (draft.support_ids, draft.support_probs) if self._trusted else (None, None)
        parents = None if draft.parents is None else tuple(int(parent) for parent in draft.parents)
        return Draft(draft.request_id, int(draft.committed_len), token_ids, *supports, parents)


def _settle(call: "asyncio.Future[object]", answer: object) -> None:
    if not call.done():
        call.set_result(answer)
