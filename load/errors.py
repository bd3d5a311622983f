"""What keeps the bench from measuring."""


class LoadError(Exception):
    """Something cannot be measured; the message is one sentence."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class RivalError(LoadError):
    """What is measured beside our server failed, not the server."""
