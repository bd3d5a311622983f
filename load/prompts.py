"""The bench's workloads: fixed prompts from code that the embedded models never trained on."""

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

WorkloadName = Literal["copy_heavy", "open_ended"]
WORKLOADS: tuple[WorkloadName, ...] = ("copy_heavy", "open_ended")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt; `kind` decides which endpoint it goes to."""

    source: str
    kind: Literal["chat", "completion"]
    text: str


def prompts(workload: WorkloadName) -> tuple[Prompt, ...]:
    """Return the workload's sixteen prompts, always in the same order."""
    text = files("specserve.load").joinpath(f"texts/{workload}.jsonl").read_text("utf-8")
    return tuple(Prompt(**json.loads(line)) for line in text.splitlines())
