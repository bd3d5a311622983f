"""`make fuzz`: a service of the embedded models under everything that clients and operators may do to it."""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from .judging import faults
from .operating import operator_shot
from .serving import Target, leaks, resident_mb, target
from .shots import any_shot, good_shot
from .visiting import Heard, Shot, visit

CHAOS_S = 25.0
NUM_CLEAN = 24
MOST_GROWTH_MB = 40.0
IDENTITIES = {
    "generation_tokens": lambda usage, spec: usage["completion_tokens"],
    "prompt_tokens": lambda usage, spec: usage["prompt_tokens"],
    "spec_decode_num_drafts": lambda usage, spec: spec["num_spec_steps"],
    "spec_decode_num_draft_tokens": lambda usage, spec: spec["num_draft_tokens"],
    "spec_decode_num_accepted_tokens": lambda usage, spec: spec["num_accepted_draft_tokens"],
    "request_success": lambda usage, spec: 1,
}
"""By vLLM's name of a counter, what answers of one choice say of it."""


@dataclass(slots=True)
class Book:
    """What was tried, answered and found."""

    out: Path
    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    rss_mb: list[float] = field(default_factory=list)

    def note(self, shot: Shot, heard: Heard) -> None:
        """Count an answer; the first requests of each fault are kept."""
        self.statuses[shot.kind, str(heard.status)] += 1
        for fault in faults(shot, heard):
            self.fault(f"{shot.kind}: {fault}", shot, heard)

    def fault(self, what: str, shot: Shot | None = None, heard: Heard | None = None) -> None:
        """Count a fault."""
        self.found[what] += 1
        if self.found[what] <= 3:
            print(f"FAULT {what}", file=sys.stderr, flush=True)
            said = {"fault": what, "request": shot and shot.request[:3000].decode("latin-1"),
                    "answer": heard and [heard.status, heard.body[:1500].decode("latin-1")]}  # fmt: skip
            with self.out.open("a") as sink:
                sink.write(json.dumps(said) + "\n")


async def chaos(service: Target, book: Book, rngs: list[Random], operator: Random, until_s: float) -> None:
    """Keep one visitor for each of `rngs` busy, and an operator, until then."""

    async def keep_visiting(rng: Random) -> None:
        while time.monotonic() < until_s:
            shot = any_shot(rng)
            book.note(shot, await visit(service.port, shot))

    async def keep_operating() -> None:
        while time.monotonic() < until_s:
            shot = operator_shot(operator)
            book.note(shot, await visit(service.admin_port, shot))
            await asyncio.sleep(operator.uniform(0, 0.2))

    await asyncio.gather(*(keep_visiting(rng) for rng in rngs), keep_operating())


async def clean(service: Target, book: Book, rng: Random) -> None:
    """Compare what whole answers say they used with what `/metrics` counted meanwhile."""
    before = service.samples()
    shots = [good_shot(rng) for _ in range(NUM_CLEAN * 4)]
    shots = [shot for shot in shots if b'"stream": true' not in shot.request and b'"n": ' not in shot.request]
    shots = [shot for shot in shots if b'"prompt": [' not in shot.request][:NUM_CLEAN]
    heard = await asyncio.gather(*(visit(service.port, shot) for shot in shots))
    for shot, one in zip(shots, heard, strict=True):
        book.note(shot, one)
    answers = [json.loads(one.body) for one in heard if one.status == 200]
    after = service.samples()
    for name, said in IDENTITIES.items():
        grown = after.total(f"vllm:{name}_total") - before.total(f"vllm:{name}_total")
        told = sum(said(one["usage"], one["metrics"]["speculative_decoding"]) for one in answers)
        if grown != told:
            book.fault(f"vllm:{name}_total grew by {grown}, the answers say {told}")


def still_growing(rss_mb: list[float]) -> bool:
    """Return whether the last third of many samples lies above the third before it by more than chance."""
    third = len(rss_mb) // 3
    return third >= 3 and min(rss_mb[-third:]) - min(rss_mb[-2 * third : -third]) > MOST_GROWTH_MB


def fuzz(service: Target, book: Book, seed: int, num_visitors: int, minutes: float) -> None:
    """Alternate between chaos and checks until the time is over."""
    rngs = [Random(f"{seed}/{place}") for place in range(num_visitors)]
    operator, cleaner = Random(f"{seed}/operator"), Random(f"{seed}/clean")
    members, end_s = service.members(), time.monotonic() + minutes * 60
    while time.monotonic() < end_s and service.process.poll() is None:
        asyncio.run(chaos(service, book, rngs, operator, min(end_s, time.monotonic() + CHAOS_S)))
        for leak in leaks(service):
            book.fault(leak)
        asyncio.run(clean(service, book, cleaner))
        book.rss_mb.append(round(resident_mb(service)))
        now = service.members()
        if now != members:
            book.fault(f"processes {members} became {now}")
            members = now
        print(f"{sum(book.statuses.values())} requests, {book.rss_mb[-1]:.0f} MB", file=sys.stderr, flush=True)
    if service.process.poll() is not None:
        book.fault(f"the service ended with {service.process.returncode}")
    if still_growing(book.rss_mb):
        book.fault(f"memory grows: {book.rss_mb} MB")
    for last in service.tracebacks():
        book.fault(f"the log has a traceback: {last[:200]}")


def main() -> int:
    """Return 0 when nothing was found."""
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--placement", choices=("inline", "actors"), default="inline")
    parser.add_argument("--visitors", type=int, default=32, help="requests at a time")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="specserve-fuzz-"))
    book = Book(folder / "faults.jsonl")
    with target(args.placement, folder) as service:
        try:
            fuzz(service, book, args.seed, args.visitors, args.minutes)
        except Exception as error:
            book.fault(f"the fuzzer ended: {error!r}")
    kinds: dict[str, dict[str, int]] = {}
    for (kind, status), count in sorted(book.statuses.items()):
        kinds.setdefault(kind.partition(" /")[0], Counter())[status] += count
    for kind, counts in kinds.items():
        print(f"{kind:20}", *(f"{status}: {count}" for status, count in counts.items()), sep="  ")
    print(f"memory, MB: {book.rss_mb}; seed {args.seed}; requests and log in {folder}")
    for what, count in book.found.most_common():
        print(f"{count} x {what}")
    print("nothing was found" if not book.found else f"{len(book.found)} kinds of faults", flush=True)
    return 1 if book.found else 0


if __name__ == "__main__":
    sys.exit(main())
