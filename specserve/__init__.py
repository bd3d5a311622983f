"""The front door: `specserve.LLM` and the `specserve` command. Importing it loads neither torch nor Ray."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specserve.deployments.llm import LLM

__all__ = ["LLM"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from specserve.deployments.llm import LLM

        return LLM
    if name == "__version__":
        from importlib.metadata import version

        return version("specserve")
    raise AttributeError(f"module 'specserve' has no attribute {name!r}")
