"""What the HTTP surface talks to: one engine, its model's name, and whether it is ready."""

import time

from transformers import PreTrainedTokenizerFast

from specserve.service.engine import Engine
from specserve.service.requests import GenerationRequest
from specserve.service.running import RequestStream


class EngineBackend:
    """Serves requests with one engine."""

    def __init__(self, engine: Engine, model_id: str, tokenizer: PreTrainedTokenizerFast) -> None:
        self.engine = engine
        self.model_id = model_id
        self.tokenizer = tokenizer
        self.created = int(time.time())

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together."""
        return self.engine.config.max_model_len

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.engine.config.vocab_size

    @property
    def ready(self) -> bool:
        """True while the engine's loop runs."""
        return not self.engine.failed

    def submit(self, request: GenerationRequest) -> RequestStream:
        """Queue `request`; raises BadRequestError before anything is allocated."""
        return self.engine.submit(request)
