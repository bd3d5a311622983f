"""transformers' own `generate`, to be measured beside ours: one JSON object a line in, one out.

`specserve bench --against transformers` runs this as a process of its own (`python -m specserve.deployments.benching`),
which works only while it has a command, so that server and rival never share the processor. The model is the plain one
of `AutoModelForCausalLM`, with transformers' own attention.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from specserve.service.errors import SpecserveError
from specserve.service.models import embedded_dir, load_tokenizer, resolve_dtype
from specserve.service.sources import local_folder, parse_source

LOOKUP_TOKENS = 10


class Generation:
    """A model with its tokenizer, and beside it the assistant that it may speculate with."""

    def __init__(self, model_dir: Path, assistant_dir: Path | None) -> None:
        self.dtype = resolve_dtype("auto")
        self._tokenizer: PreTrainedTokenizerFast = load_tokenizer(model_dir)
        self._model = _vanilla(model_dir, self.dtype)
        self._ways: dict[str, dict[str, Any]] = {
            "plain": {},
            "prompt_lookup": {"prompt_lookup_num_tokens": LOOKUP_TOKENS},
        }
        if assistant_dir is not None:
            self._ways["assistant"] = {"assistant_model": _vanilla(assistant_dir, self.dtype)}

    def offer(self) -> dict[str, Any]:
        """Return what can be asked for, and of what."""
        return {
            "settings": list(self._ways),
            "dtype": str(self.dtype).removeprefix("torch."),
            "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        }

    def run(self, command: dict[str, Any]) -> dict[str, Any]:
        """Return the seconds and tokens of each batch of `command`'s prompts, in their order."""
        prompts = [self.token_ids(kind, text) for kind, text in command["prompts"]]
        size = command["batch"]
        batches = []
        for start in range(0, len(prompts), size):
            batch = prompts[start : start + size]
            began = time.perf_counter()
            new = self.generate(command["setting"], batch, command["max_tokens"], command["temperature"])
            wall_s = time.perf_counter() - began
            lengths = [len(prompt) for prompt in batch]
            batches.append({"wall_s": wall_s, "num_tokens": new.shape[1], "num_prompt_tokens": lengths})
        return {"batches": batches}

    def token_ids(self, kind: str, text: str) -> list[int]:
        """Return the tokens that our server makes of the same prompt."""
        if kind == "completion":
            return list(self._tokenizer.encode(text))
        rendered = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        return list(self._tokenizer.encode(str(rendered), add_special_tokens=False))

    def generate(self, way: str, prompts: Sequence[list[int]], max_tokens: int, temperature: float) -> torch.Tensor:
        """Return `max_tokens` new tokens a prompt, padded on the left to one batch; end tokens end nothing.

        *Shapes*: `[len(prompts), max_tokens]`, int64.
        """
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        with torch.inference_mode():
            whole = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=max_tokens,
                pad_token_id=0,
                **sampling,
                **self._ways[way],
            )
        new: torch.Tensor = whole[:, longest:]
        if new.shape[1] != max_tokens:
            raise RuntimeError(f"{way} made {new.shape[1]} tokens instead of {max_tokens}")
        return new


def _vanilla(model_dir: Path, dtype: torch.dtype) -> Any:
    """Return transformers' own model, made to ignore end tokens."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, use_safetensors=True).eval()
    model.generation_config.eos_token_id = None
    return model


def answer_commands(generation: Generation, commands: TextIO, answers: TextIO) -> None:
    """Answer each line of `commands` until they end; a command that fails is answered with its error."""
    for line in commands:
        try:
            answer = generation.run(json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def main() -> int:
    """Load the model that the command line names, then answer commands from stdin on stdout."""
    parser = argparse.ArgumentParser(prog="python -m specserve.deployments.benching", description=__doc__)
    parser.add_argument("model", nargs="?", help="name or folder of the model (default: the embedded one)")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not be taken for answers
    torch.set_num_threads(args.threads)
    try:
        if args.model is None:
            generation = Generation(embedded_dir("target"), embedded_dir("draft"))
        else:
            generation = Generation(local_folder(parse_source(args.model)), None)
    except (SpecserveError, OSError, ValueError) as error:
        print(json.dumps({"error": str(error)}), file=answers, flush=True)
        return 1
    print(json.dumps(generation.offer()), file=answers, flush=True)
    answer_commands(generation, sys.stdin, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
