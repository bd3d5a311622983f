"""A program that stands in for transformers' process: it answers at once with made-up seconds."""

import json
import sys

print(json.dumps({"settings": ["plain", "prompt_lookup"], "dtype": "bfloat16", "versions": {"transformers": "9"}}))
sys.stdout.flush()
for line in sys.stdin:
    command = json.loads(line)
    if sys.argv[1:] == ["broken"]:
        print("the rival's traceback", file=sys.stderr, flush=True)
        print(json.dumps({"error": "no memory"}), flush=True)
        continue
    size, count = command["batch"], len(command["prompts"])
    lengths = [[5] * min(size, count - start) for start in range(0, count, size)]
    seconds = 0.5 if command["setting"] == "plain" else 0.25
    batches = [{"wall_s": seconds, "num_tokens": 10, "num_prompt_tokens": found} for found in lengths]
    print(json.dumps({"batches": batches}), flush=True)
