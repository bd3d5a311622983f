"""The front door: `specserve.LLM` and the `specserve` command."""
