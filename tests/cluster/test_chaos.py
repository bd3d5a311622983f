"""Random deaths and stalls under load: every request completes, and its text is the quiet run's.

`make chaos` does it for five minutes instead of thirty seconds.
"""

import os
import random
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from support.identity import TWENTY
from support.service import Service

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]

SECONDS = float(os.environ.get("CHAOS_SECONDS", "30"))
CLIENTS = 6
STALL_S = 1.5
WISHES: list[dict[str, Any]] = [
    {"mode": "off"},
    {"mode": "auto"},
    {"mode": "on", "max_draft_tokens": 4, "proposer": "draft"},
    {"mode": "on", "max_draft_tokens": 8, "proposer": "prompt_lookup"},
]


def complete(service: Service, prompt: str, speculation: dict[str, Any]) -> str:
    sent = {"model": "specserve-embedded", "prompt": prompt, "max_tokens": 64, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{service.url}/v1/completions", json={**sent, "speculation": speculation}, timeout=120)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


class Load:
    """Clients that ask on until the end and compare."""

    def __init__(self, service: Service, quiet: dict[str, str], end_s: float) -> None:
        self._service, self._quiet, self._end_s = service, quiet, end_s
        self.completed = 0
        self.changed = threading.Condition()

    def run(self, seed: int) -> None:
        chance = random.Random(seed)
        while time.monotonic() < self._end_s:
            prompt, wish = chance.choice(list(self._quiet)), chance.choice(WISHES)
            assert complete(self._service, prompt, wish) == self._quiet[prompt], (prompt, wish)
            with self.changed:
                self.completed += 1
                self.changed.notify_all()

    def wait_for(self, more: int, at_most_s: float) -> None:
        """Return after so many more requests, or so many seconds."""
        with self.changed:
            wanted = self.completed + more
            self.changed.wait_for(lambda: self.completed >= wanted, at_most_s)


def pid_of(service: Service, victim: str) -> int | None:
    """Return the victim's process id, None while it is being replaced."""
    try:
        return service.pids()[victim]
    except Exception:
        return None


def harm(service: Service, load: Load, chance: random.Random) -> str:
    """Kill one part, or stop it for a moment; return what was done."""
    victim, stall = chance.choice(["target", "verifier", "proposer"]), chance.random() < 0.5
    pid = pid_of(service, victim)
    if pid is None:
        return "nothing"
    os.kill(pid, signal.SIGSTOP if stall else signal.SIGKILL)
    if stall:
        try:
            load.wait_for(1_000_000, chance.uniform(0.1, STALL_S))
        finally:
            os.kill(pid, signal.SIGCONT)
    return f"{victim} {'stalled' if stall else 'killed'}"


def test_under_random_kills_and_stalls_every_request_completes_with_the_quiet_runs_text(service: Service) -> None:
    quiet = {prompt: complete(service, prompt, {"mode": "off"}) for prompt in TWENTY[:8]}
    load, chance = Load(service, quiet, time.monotonic() + SECONDS), random.Random(11)
    end_s, done = time.monotonic() + SECONDS, Counter[str]()
    with ThreadPoolExecutor(CLIENTS) as pool:
        running = [pool.submit(load.run, seed) for seed in range(CLIENTS)]
        while time.monotonic() < end_s:
            load.wait_for(chance.randrange(2, 12), 10.0)
            done[harm(service, load, chance)] += 1
        for one in running:
            one.result(timeout=180)
    print(load.completed, dict(done))
    assert load.completed > SECONDS / 10
    assert sum(count for what, count in done.items() if what != "nothing") >= SECONDS / 15
    assert httpx.get(f"{service.url}/ready", timeout=30).status_code == 200
