"""What the HTTP surface talks to: one engine, its model's name, and whether it is ready."""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence

from transformers import PreTrainedTokenizerFast

from specserve.service.engine import Engine
from specserve.service.grammar import Grammars
from specserve.service.requests import GenerationRequest
from specserve.service.running import RequestStream

from .api.backend import AnswerStyle, CellSnapshot, Load
from .api.stats import HttpStats
from .api.watching import RequestObserver
from .recorder import ShadowTally

OTLP_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
PEERS_WITHIN_S = 1.0
LOG = logging.getLogger(__name__)

Peers = Callable[[], Awaitable[Sequence[CellSnapshot]]]
"""Returns what was last heard of the other cells of the service."""


class EngineBackend:
    """Serves requests with one engine."""

    def __init__(
        self,
        engine: Engine,
        model_id: str,
        tokenizer: PreTrainedTokenizerFast,
        warm_up: Callable[[], Awaitable[None]],
        style: AnswerStyle,
        dtype: str | None = None,
        placement: str | None = None,
        shadow: Callable[[], ShadowTally | None] = lambda: None,
    ) -> None:
        self.dtype = dtype
        self.placement = placement
        self._warm_up = warm_up
        self._shadow = shadow
        self._started = False
        self.engine = engine
        self.model_id = model_id
        self.style = style
        self.tokenizer = tokenizer
        self.created = int(time.time())
        self.cell_id = f"{os.uname().nodename}-{os.getpid()}"
        self.http = HttpStats()
        self.observers: list[RequestObserver] = [self.http]
        self.peers: Peers | None = None

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together."""
        return self.engine.max_request_tokens

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.engine.config.vocab_size

    @property
    def grammars(self) -> Grammars | None:
        """The grammars that requests may name."""
        return self.engine.grammars

    @property
    def ready(self) -> bool:
        """True from the end of warm-up for as long as the engine's loop runs."""
        return self._started and not self.engine.failed

    @property
    def load(self) -> Load:
        """What the engine has to do."""
        return Load(self.engine.num_running + self.engine.num_waiting, self.engine.config.max_running)

    async def start(self) -> None:
        """Measure what rounds cost, then start the engine's loop."""
        await self._warm_up()
        self.engine.start()
        self._started = True

    def export_telemetry(self) -> None:
        """Push metrics and traces to OpenTelemetry from now on, if the environment says where."""
        if os.environ.get(OTLP_ENDPOINT):
            from .otel import start

            exporter = start(self.snapshot)
            self.observers += [exporter] if exporter is not None else []

    def snapshot(self) -> CellSnapshot:
        """Return what `/metrics` shows of this cell."""
        engine = self.engine
        return CellSnapshot(
            engine=self.cell_id,
            model_id=self.model_id,
            stats=engine.counters,
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            num_pages=engine.config.num_pages,
            num_free_pages=engine.num_free_pages,
            proposers=engine.proposers,
            policy_version=engine.policy_version,
            http=self.http,
            shadow=self._shadow(),
        )

    async def cells(self) -> Sequence[CellSnapshot]:
        """Return this cell and what was last heard of the others; without an answer, this one alone."""
        if self.peers is None:
            return [self.snapshot()]
        try:
            async with asyncio.timeout(PEERS_WITHIN_S):
                return [self.snapshot(), *await self.peers()]
        except Exception as error:  # whoever scrapes gets what there is
            LOG.warning("nothing is known of the other cells: %r", error)
            return [self.snapshot()]

    def submit(self, request: GenerationRequest) -> RequestStream:
        """Queue `request`; raises BadRequestError before anything is allocated."""
        return self.engine.submit(request)
