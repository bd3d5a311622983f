"""The bench's workloads: fixed prompts from code that the embedded models never trained on."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Literal

from .errors import LoadError

WorkloadName = Literal["copy_heavy", "open_ended", "mixed", "long_prompt"]
WORKLOADS: tuple[WorkloadName, ...] = ("copy_heavy", "open_ended", "mixed", "long_prompt")
LONG_PROMPT_TOKENS = 2000
CONTEXT_MARGIN = 0.95
"""What of the context a cut prompt may fill: its length in tokens is an estimate."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt; `kind` decides which endpoint it goes to."""

    source: str
    kind: Literal["chat", "completion"]
    text: str


def workload_name(text: str) -> WorkloadName:
    """Return the workload called `text`. Raises LoadError when there is none."""
    for name in WORKLOADS:
        if name == text:
            return name
    raise LoadError(f"A workload is one of {', '.join(WORKLOADS)}, not {text!r}.")


def prompts(workload: WorkloadName) -> tuple[Prompt, ...]:
    """Return the workload's sixteen prompts, always in the same order; `mixed` takes turns between two others."""
    if workload == "mixed":
        pairs = zip(prompts("copy_heavy"), prompts("open_ended"), strict=True)
        return tuple(prompt for pair in pairs for prompt in pair)[:16]
    text = files("specserve.load").joinpath(f"texts/{workload}.jsonl").read_text("utf-8")
    return tuple(Prompt(**json.loads(line)) for line in text.splitlines())


def cycled(found: Sequence[Prompt], count: int) -> tuple[Prompt, ...]:
    """Return `count` prompts, from the start again when there are fewer."""
    return tuple(found[place % len(found)] for place in range(count))


def as_completion(prompt: Prompt) -> Prompt:
    """Return the prompt for a model without a chat template: an opened code block asks it to begin the answer."""
    if prompt.kind == "completion":
        return prompt
    return replace(prompt, kind="completion", text=f"{prompt.text}\n\n```python\n")


def cut(prompt: Prompt, tokens_per_char: float, max_prompt_tokens: int) -> Prompt:
    """Return the prompt cut after a line to about `LONG_PROMPT_TOKENS`, or to what a shorter context allows."""
    room = min(LONG_PROMPT_TOKENS, int(max_prompt_tokens * CONTEXT_MARGIN))
    text = prompt.text[: max(1, int(room / tokens_per_char))]
    return replace(prompt, text=text[: text.rfind("\n") + 1] or text)
