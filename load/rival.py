"""transformers' own `generate` on the same prompts, in a process that works only when told to.

The process (`specserve.deployments.benching`) reads one JSON object a line and answers with one: first what it offers,
then, for every pass asked for, the tokens and seconds of each batch.

OpenMP waits there as it does for everybody, by spinning. With two quiet cores that is the embedded model's fastest
way, 178-198 tokens a second against 88-93 waiting passively, and a rival must not be slowed down. Where strangers use
one of the cores it is by far the slowest, 2-20 against 71-153: then no ratio to it means anything (`budgets.doubts`).
"""

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .errors import RivalError
from .figures import Pass, Sample
from .prompts import Prompt

PREFIX = "transformers:"
NUM_THREADS = 2
LOG_LINES = 15


class Rival:
    """The running process; `settings` are the ways to generate that it can be asked for."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        offer = self._answer()
        self.settings: tuple[str, ...] = tuple(offer["settings"])
        self.dtype: str = offer["dtype"]
        self.versions: dict[str, str] = offer["versions"]

    def run_pass(
        self, setting: str, found: Sequence[Prompt], concurrency: int, max_tokens: int, temperature: float
    ) -> Pass:
        """Return a pass in batches of `concurrency`; its samples know their batch's seconds and their tokens only.

        Raises: RivalError when the process fails.
        """
        command = {
            "setting": setting,
            "prompts": [[prompt.kind, prompt.text] for prompt in found],
            "batch": concurrency,
            "max_tokens": max_tokens,
            "temperature": temperature,
        }
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise RivalError("transformers' process has ended.") from error
        batches = self._answer()["batches"]
        samples = tuple(
            Sample((), batch["wall_s"], batch["num_tokens"], None, num_prompt_tokens=num_prompt)
            for batch in batches
            for num_prompt in batch["num_prompt_tokens"]
        )
        return Pass(samples, sum(batch["wall_s"] for batch in batches))

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RivalError("transformers' process ended without an answer.")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RivalError(f"transformers' generate failed: {answer['error']}")
        return answer


def rival_command(model: str | None) -> list[str]:
    """Return the command that loads `model` (None: the embedded one) into transformers' own classes."""
    named = [] if model is None else [model]
    return [sys.executable, "-m", "specserve.deployments.benching", "--threads", str(NUM_THREADS), *named]


@contextlib.contextmanager
def rival(command: list[str]) -> Iterator[Rival]:
    """Run `command`, yield it once its model is loaded, and end it afterwards; its log goes to stderr on failure."""
    with tempfile.TemporaryDirectory(prefix="specserve-bench-") as folder:
        log = Path(folder) / "transformers.log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
                start_new_session=True,
            )
        try:
            yield Rival(process)
        except RivalError:
            said = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
            print(*said, sep="\n", file=sys.stderr)
            raise
        finally:
            _end(process)


def _end(process: "subprocess.Popen[str]") -> None:
    """End the process, which has nothing to save."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):
            pipe.close()
