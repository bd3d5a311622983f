"""One exception tree.

SpecserveError
├── BadRequestError            the caller's mistake: names the field
│   ├── PromptTooLongError     the prompt can never fit
│   └── ModelNotFoundError     no such model
├── ModelUnsupportedError      a model this engine refuses to load
├── RoundLostError             target or verifier died during a round
├── ProposerUnavailableError   a proposer did not answer in time, or at all
├── ChannelError               a peer could not be reached or broke the protocol
└── EngineStoppedError         the engine is shutting down
"""


class SpecserveError(Exception):
    """The root; `message` is one sentence for the person who reads it."""

    def __init__(self, message: str, *fields: object) -> None:
        super().__init__(message, *fields)
        self.message = message


class BadRequestError(SpecserveError):
    """A request that can never succeed as sent; `param` names the field at fault, `code` is OpenAI's code or None."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param, code)
        self.param = param
        self.code = code


class PromptTooLongError(BadRequestError):
    """Prompt and output cannot fit into the model's context."""


class ModelNotFoundError(BadRequestError):
    """The named model is not served here."""


class ModelUnsupportedError(SpecserveError):
    """A model whose kind or files this engine cannot serve exactly."""


class RoundLostError(SpecserveError):
    """The target or the verifier died during a round; nothing was committed."""


class ProposerUnavailableError(SpecserveError):
    """A proposer was late, dead or answered something else; the round goes on without its drafts."""


class ChannelError(SpecserveError):
    """A peer could not be reached, refused our credential, or sent a malformed frame."""


class EngineStoppedError(SpecserveError):
    """The engine stopped before the request was finished."""
