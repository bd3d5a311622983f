"""Who takes turns on the same prompts: one server in several modes, or a server for each proposer, all at once."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from .cells import contestant_name
from .client import PREDICTION, Ask, Client, ServerFacts, speculation
from .errors import LoadError
from .figures import Pass
from .hardware import available_mb
from .plan import ALL, Plan, variant_of
from .processes import others_cpu_s, rss_mb
from .progress import Progress
from .prompts import Prompt
from .server import free_port, serve_command, serving


@dataclass(frozen=True, slots=True)
class Contestant:
    """Somebody who can do a pass: `run` takes prompts, concurrency and new tokens a request.

    One that `follows_predictions` has nothing to do where prompts bring none.
    """

    name: str
    run: Callable[[Sequence[Prompt], int, int], Pass]
    follows_predictions: bool = False

    def can_draft(self, chosen: Sequence[Prompt]) -> bool:
        """Return whether these prompts are worth a pass."""
        return not self.follows_predictions or any(prompt.prediction is not None for prompt in chosen)


@dataclass(frozen=True, slots=True)
class Lineup:
    """Our contestants, and a server that knows the model which all of them run.

    `families` are the roots of all processes of the bench; none where a server is not ours.
    """

    client: Client
    facts: ServerFacts
    contestants: tuple[Contestant, ...]
    families: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Host:
    """A server with its process, where it is ours."""

    client: Client
    facts: ServerFacts
    pid: int | None


def lineup(plan: Plan, stack: ExitStack) -> Lineup:
    """Return the plan's contestants; the servers that are started for them end with `stack`. Raises LoadError."""
    return _modes(plan, stack) if not plan.proposers else _proposers(plan, stack)


def _modes(plan: Plan, stack: ExitStack) -> Lineup:
    host = _host(plan, stack)
    families = _families([host])
    ours = [_contestant(host, plan, mode, plan.proposer, mode, families) for mode in plan.modes]
    return Lineup(host.client, host.facts, tuple(ours), families)


def _proposers(plan: Plan, stack: ExitStack) -> Lineup:
    """Return plain decoding, then every proposer in every mode that speculates.

    Where the bench starts the servers, each proposer is alone in one, so that its memory is seen; plain decoding has
    one without any, so that nothing slows it.
    """
    hosts: dict[str, _Host] = {}
    if plan.url is not None:
        plain = _host(plan, stack)
        offered = plain.client.proposers()
        hosts = {name: plain for name in (offered if plan.proposers == (ALL,) else plan.proposers)}
    else:
        progress = Progress(1 + len(plan.proposers), "server")
        try:
            plain = _host(plan, stack, "")
            progress.started("a server without proposers")
            _check_memory(plain, len(plan.proposers))
            for name in plan.proposers:
                hosts[name] = _host(plan, stack, name)
                progress.started(f"a server with {name}")
        finally:
            progress.close()
    families = _families([plain, *hosts.values()])
    ours = [_contestant(plain, plan, "plain", None, "plain", families)]
    for name, host in hosts.items():
        asked = _asked(name, host.client.proposers())
        modes = [mode for mode in plan.modes if mode != "plain"]
        ours += [_contestant(host, plan, mode, asked, contestant_name(mode, name), families) for mode in modes]
    return Lineup(plain.client, plain.facts, tuple(ours), families)


def _check_memory(plain: _Host, num_more: int) -> None:
    """Raise LoadError when so many more servers like this one would not fit beside it."""
    each_mb = None if plain.pid is None else rss_mb(plain.pid)
    free_mb = available_mb()
    if each_mb is not None and free_mb is not None and num_more * each_mb > free_mb:
        raise LoadError(
            f"A server of this model takes {each_mb:.0f} MB and {free_mb:.0f} MB are free: too little for {num_more} "
            "more at once; name fewer proposers."
        )


def _asked(wanted: str, offered: Sequence[str]) -> str:
    """Return what the server calls the proposer; one that is an import path has a name of its own there."""
    name, _ = variant_of(wanted)
    if name in offered:
        return name
    if ":" in name and len(offered) == 1:
        return offered[0]
    raise LoadError(f"The server has no proposer {wanted!r}, but {', '.join(offered) or 'none'}.")


def _host(plan: Plan, stack: ExitStack, proposer: str | None = None) -> _Host:
    """Return the plan's server, or one that it starts; with `proposer` that has no other, and "" is none at all."""
    url, pid = plan.url, None
    if url is None:
        port = free_port()
        command = serve_command(plan.model, plan.placement, port, (*plan.serve_flags, *_only(proposer)))
        server = stack.enter_context(serving(command, port, one_of_many=proposer is not None))
        url, pid = server.url, server.pid
    client = Client(url)
    return _Host(client, client.facts(), pid)


def _only(proposer: str | None) -> tuple[str, ...]:
    if proposer is None:
        return ()
    name, flags = variant_of(proposer)
    return ("--proposers", name, *flags)


def _families(hosts: Sequence[_Host]) -> tuple[int, ...]:
    """Return the roots of all processes that the bench consists of; none if a server's is unknown."""
    pids = [host.pid for host in hosts if host.pid is not None]
    return (os.getpid(), *pids) if len(pids) == len(hosts) else ()


def _contestant(
    host: _Host, plan: Plan, mode: str, proposer: str | None, name: str, families: Sequence[int]
) -> Contestant:
    wanted = speculation(mode, proposer)

    def one_pass(chosen: Sequence[Prompt], concurrency: int, max_tokens: int) -> Pass:
        return host.client.run_pass(host.facts.model, chosen, concurrency, Ask(wanted, max_tokens, plan.temperature))

    return watched(Contestant(name, one_pass, proposer == PREDICTION), host.pid, families)


def watched(one: Contestant, pid: int | None, families: Sequence[int]) -> Contestant:
    """Return the contestant with what its passes cost: memory, and what strangers took of the machine meanwhile.

    `pid` is its server's, None if it has none; `families` are the processes that are no strangers. Without these both
    stay unknown.
    """
    if not families:
        return one

    def one_pass(chosen: Sequence[Prompt], concurrency: int, max_tokens: int) -> Pass:
        before, started = others_cpu_s(families), time.perf_counter()
        done = one.run(chosen, concurrency, max_tokens)
        after, wall_s = others_cpu_s(families), time.perf_counter() - started
        share = None if before is None or after is None else max(0.0, (after - before) / wall_s)
        return replace(done, rss_mb=None if pid is None else rss_mb(pid), others_cpu_share=share)

    return replace(one, run=one_pass)
