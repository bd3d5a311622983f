"""`specserve generate`: one completion, offline, in this process."""

import argparse
import sys

from specserve.service.messages import Sampling

from .llm import LLM
from .settings import load_settings


def run(args: argparse.Namespace) -> int:
    """Print the completion to stdout and what speculation did to stderr."""
    given = {"model": args.model, "policy": args.policy, "placement": "inline"}
    settings = load_settings(None, given if args.proposer is None else {**given, "proposers": (args.proposer,)})
    greedy = args.temperature == 0
    sampling = Sampling(greedy=greedy, temperature=args.temperature or 1.0, seed=args.seed or 0)
    with LLM(settings=settings) as llm:
        done = llm.generate([args.prompt], max_tokens=args.max_tokens, sampling=sampling, proposer=args.proposer)[0]
    print(done.text)
    summary = done.summary
    rate = summary.completion_tokens / max(1, summary.num_rounds + 1)
    print(
        f"{summary.completion_tokens} tokens, {rate:.2f} a round, {summary.num_accepted_tokens} of "
        f"{summary.num_draft_tokens} drafted accepted; reason {summary.reason}, proposer {summary.proposer}",
        file=sys.stderr,
    )
    return 0
