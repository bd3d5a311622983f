"""Everything in one process: ports that call target, verifier and proposers directly, off the event loop."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from .errors import ProposerUnavailableError
from .messages import DraftBatch, ProposeBatch, ScoreBatch, VerdictBatch, VerifyBatch
from .ports import CommittedOutput, Learner, Proposer
from .target import Target
from .verifier import Verifier


class InlineRoundPort:
    """Scores and verifies on one worker thread; nothing can be lost, so nothing is ever recovered."""

    def __init__(self, target: Target, verifier: Verifier, executor: ThreadPoolExecutor) -> None:
        self._target = target
        self._verifier = verifier
        self._executor = executor

    async def run_round(self, score: ScoreBatch, verify: VerifyBatch) -> VerdictBatch:
        """Return the verdicts of one round."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._run, score, verify)

    async def recover(self) -> bool:
        """Return False: the KV is where it was."""
        return False

    def _run(self, score: ScoreBatch, verify: VerifyBatch) -> VerdictBatch:
        features = self._target.score(score)
        if not verify.rows:
            return VerdictBatch(verify.round, (), 0.0)
        return self._verifier.verify(features, verify)


class InlineProposerPort:
    """Calls a proposer on the worker thread. An exception in it is a missed proposal, never an error of the request."""

    generation = 0
    available = True

    def __init__(self, proposer: Proposer, executor: ThreadPoolExecutor, needs_pages: bool = False) -> None:
        self._proposer = proposer
        self._executor = executor
        self.name = proposer.name
        self.needs_pages = needs_pages

    async def propose(self, batch: ProposeBatch, timeout_s: float) -> DraftBatch:
        """Return the drafts; `timeout_s` is not enforced, since the thread could not be interrupted."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._executor, self._proposer.propose, batch)
        except Exception as error:
            raise ProposerUnavailableError(f"{self.name} failed: {error}") from error


class DirectProposerPort:
    """Calls a proposer that costs microseconds, on the event loop itself."""

    generation = 0
    available = True
    needs_pages = False

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self.name = proposer.name

    async def propose(self, batch: ProposeBatch, timeout_s: float) -> DraftBatch:
        """Return the drafts at once."""
        try:
            return self._proposer.propose(batch)
        except Exception as error:
            raise ProposerUnavailableError(f"{self.name} failed: {error}") from error

    def observe(self, output: CommittedOutput) -> None:
        """Tell a proposer that learns from it what a request wrote."""
        if not isinstance(self._proposer, Learner):
            return
        try:
            self._proposer.observe(output)
        except Exception as error:
            raise ProposerUnavailableError(f"{self.name} failed: {error}") from error
