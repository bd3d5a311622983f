"""One exception tree.

SpecserveError
├── BadRequestError            the caller's mistake: names the field
│   ├── PromptTooLongError     the prompt can never fit
│   └── ModelNotFoundError     no such model
├── UnauthenticatedError       no key, or an unknown one
├── ForbiddenError             a known key that may not do this
├── QuotaExceededError         a key used up what it may use
├── OverloadedError            the cell has no room for one more request
├── ModelUnsupportedError      a model this engine refuses to load
├── RoundLostError             target or verifier died during a round
├── ProposerUnavailableError   a proposer did not answer in time, or at all
├── ChannelError               a peer could not be reached or broke the protocol
├── StoreUnavailableError      the policy store cannot be read or written
├── VersionConflictError       the policy changed since the caller read it
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


class UnauthenticatedError(SpecserveError):
    """Nobody is known by what was sent in place of a key; `code` says what was wrong with it."""

    def __init__(self, message: str, code: str = "invalid_api_key") -> None:
        super().__init__(message, code)
        self.code = code


class ForbiddenError(SpecserveError):
    """The key is known and may not do this; `param` names the field that asks for it, if one does."""

    def __init__(self, message: str, param: str | None = None, code: str = "not_allowed") -> None:
        super().__init__(message, param, code)
        self.param = param
        self.code = code


class QuotaExceededError(SpecserveError):
    """A limit of the key is reached; `retry_after_s` is None when the same request can never fit."""

    def __init__(self, message: str, retry_after_s: float | None, code: str = "rate_limit_exceeded") -> None:
        super().__init__(message, retry_after_s, code)
        self.retry_after_s = retry_after_s
        self.code = code


class OverloadedError(SpecserveError):
    """Too many requests wait already; nothing was allocated for this one."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s)
        self.retry_after_s = retry_after_s


class ModelUnsupportedError(SpecserveError):
    """A model whose kind or files this engine cannot serve exactly."""


class RoundLostError(SpecserveError):
    """The target or the verifier died during a round; nothing was committed."""


class ProposerUnavailableError(SpecserveError):
    """A proposer was late, dead or answered something else; the round goes on without its drafts."""


class ChannelError(SpecserveError):
    """A peer could not be reached, refused our credential, or sent a malformed frame."""


class StoreUnavailableError(SpecserveError):
    """The policy store cannot be read or written; what is in force stays in force."""


class VersionConflictError(SpecserveError):
    """Another change came first: the version that the caller expected is not the active one any more."""


class EngineStoppedError(SpecserveError):
    """The engine stopped before the request was finished."""
