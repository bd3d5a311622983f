"""The bench's workloads: fixed prompts from code that the embedded models never trained on."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import groupby
from typing import Literal, get_args

from .errors import LoadError

WorkloadName = Literal["copy_heavy", "open_ended", "mixed", "long_prompt", "code", "repeated"]
WORKLOADS: tuple[WorkloadName, ...] = get_args(WorkloadName)
PREDICTABLE: tuple[WorkloadName, ...] = ("copy_heavy", "repeated")
"""Workloads whose answers repeat most of a code block in the prompt, as a caller would predict."""
FENCE = "```python\n"
LONG_PROMPT_TOKENS = 2000
CONTEXT_MARGIN = 0.95
"""What of the context a cut prompt may fill: its length in tokens is an estimate."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt; `kind` decides which endpoint it goes to.

    Prompts of one `session` follow each other, each after the answer to the one before; None stands alone.
    `prediction` is what a caller would predict of the answer.
    """

    source: str
    kind: Literal["chat", "completion"]
    text: str
    session: str | None = None
    prediction: str | None = None


def workload_name(text: str) -> WorkloadName:
    """Return the workload called `text`. Raises LoadError when there is none."""
    for name in WORKLOADS:
        if name == text:
            return name
    raise LoadError(f"A workload is one of {', '.join(WORKLOADS)}, not {text!r}.")


def prompts(workload: WorkloadName) -> tuple[Prompt, ...]:
    """Return the workload's prompts, always in the same order: sixteen, or eight sessions of four of `repeated`.

    `mixed` takes turns between two others.
    """
    if workload == "mixed":
        pairs = zip(prompts("copy_heavy"), prompts("open_ended"), strict=True)
        return tuple(prompt for pair in pairs for prompt in pair)[:16]
    text = files("specserve.load").joinpath(f"texts/{workload}.jsonl").read_text("utf-8")
    found = tuple(Prompt(**json.loads(line)) for line in text.splitlines())
    return tuple(replace(one, prediction=_block(one.text)) for one in found) if workload in PREDICTABLE else found


def _block(text: str) -> str:
    return text.partition(FENCE)[2].rpartition("\n```")[0]


def sessions(found: Sequence[Prompt]) -> list[tuple[Prompt, ...]]:
    """Return the prompts in groups that each must be sent in turn: neighbours of one session, or one alone."""
    groups: list[tuple[Prompt, ...]] = []
    for session, members in groupby(found, key=lambda one: one.session):
        group = tuple(members)
        groups += [group] if session is not None else [(one,) for one in group]
    return groups


def chosen(found: Sequence[Prompt], count: int, concurrency: int) -> tuple[Prompt, ...]:
    """Return at least `count` prompts in at least `concurrency` whole sessions; from the start again if need be."""
    groups = sessions(found)
    taken: list[Prompt] = []
    num_taken = 0
    while len(taken) < count or num_taken < concurrency:
        taken += groups[num_taken % len(groups)]
        num_taken += 1
    return tuple(taken)


def cycled(found: Sequence[Prompt], count: int) -> tuple[Prompt, ...]:
    """Return `count` prompts, from the start again when there are fewer."""
    return tuple(found[place % len(found)] for place in range(count))


def as_completion(prompt: Prompt) -> Prompt:
    """Return the prompt for a model without a chat template: an opened code block asks it to begin the answer."""
    if prompt.kind == "completion":
        return prompt
    return replace(prompt, kind="completion", text=f"{prompt.text}\n\n{FENCE}")


def cut(prompt: Prompt, tokens_per_char: float, max_prompt_tokens: int) -> Prompt:
    """Return the prompt cut after a line to about `LONG_PROMPT_TOKENS`, or to what a shorter context allows."""
    room = min(LONG_PROMPT_TOKENS, int(max_prompt_tokens * CONTEXT_MARGIN))
    text = prompt.text[: max(1, int(room / tokens_per_char))]
    return replace(prompt, text=text[: text.rfind("\n") + 1] or text)
