"""`specserve serve`: start everything in the foreground, say when it is ready, stop everything on Ctrl-C."""

import argparse
import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import httpx
import uvicorn

from specserve.service.errors import BadRequestError, SpecserveError
from specserve.service.models import read_shape
from specserve.service.proposers.checkpoint import read_config

from .credentials import ADMIN_KEY_VARIABLE, Credentials, load_admin_key, load_key_file
from .heap import freeze_heap
from .settings import ServiceSettings, load_policy, load_settings
from .startup import governing_name, prepared_store, with_admin

READY_TIMEOUT_S = 180.0
LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted and return the exit code."""
    settings = settings_from(args)
    check(settings)
    settings = with_admin(settings).pinned()
    _check_port(settings.host, settings.admin_port)
    print(f"specserve: starting {settings.model_id} ({settings.placement}) ...", file=sys.stderr, flush=True)
    return _run_inline(settings) if settings.placement == "inline" else _run_actors(settings)


def settings_from(args: argparse.Namespace) -> ServiceSettings:
    """Return the settings that the command line (over a `--config` file) asks for."""
    stated = {name: getattr(args, name, None) for name in ServiceSettings.model_fields}
    return load_settings(args.config, {name: value for name, value in stated.items() if value is not None})


def buildable(args: argparse.Namespace, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of the proposers `names` that can be built of what the command line says of models and layers."""
    found: list[str] = []
    for name in names:
        settings = settings_from(argparse.Namespace(**{**vars(args), "proposers": (name,), "config": None}))
        with contextlib.suppress(BadRequestError):
            found += settings.usable_proposers
    return tuple(found)


def check(settings: ServiceSettings) -> None:
    """Raise SpecserveError for what can be known to be wrong before anything is started.

    Models come last: to read what they are may take a download or a conversion.
    """
    load_policy(settings.policy)
    _check_keys(settings)
    _check_port(settings.host, settings.port)
    drafts = "draft" in settings.usable_proposers
    for folder in settings.attached_folders.values():
        read_config(folder)
    read_shape(settings.model_source)
    if drafts and settings.draft_source is not None:
        read_shape(settings.draft_source)


def _check_keys(settings: ServiceSettings) -> None:
    """Raise SpecserveError for keys that cannot be used, and for a host that strangers reach without any."""
    admin_key = load_admin_key(settings.admin_key_file, os.environ)
    if settings.api_keys is not None:
        load_key_file(Path(settings.api_keys))
    missing = [
        name
        for name, there in (
            ("no API keys (--api-keys FILE)", settings.api_keys is not None),
            (f"no admin key (--admin-key-file FILE or {ADMIN_KEY_VARIABLE})", admin_key is not None),
        )
        if not there
    ]
    if missing and settings.host not in LOOPBACK_HOSTS:
        said = " and ".join(missing)
        raise SpecserveError(f"{said} configured, so only loopback may be bound, not {settings.host!r}")


def ready_line(settings: ServiceSettings) -> str:
    """Return what is printed once `/ready` answers 200."""
    url = f"http://{settings.host}:{settings.port}"
    about = f"model {settings.model_id}; policy {governing_name(settings)}; admin at {admin_url(settings)}"
    return f"specserve: ready at {url}  ({about}); Ctrl-C stops it"


def admin_url(settings: ServiceSettings) -> str:
    """Return where the admin API answers."""
    return f"http://{settings.host}:{settings.admin_port}"


def _catch_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)


def _interrupt(*_: object) -> None:
    """End whatever the main thread does, start-up included; a second signal is ignored while things are stopped."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    print("specserve: stopping ...", file=sys.stderr, flush=True)
    raise KeyboardInterrupt


def _check_port(host: str, port: int | None) -> None:
    if port is None:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise SpecserveError(f"cannot listen on {host}:{port}: {error.strerror}") from error


def _wait_ready(settings: ServiceSettings) -> bool:
    urls = [f"http://{settings.host}:{settings.port}/ready", f"{admin_url(settings)}/health"]
    for _ in range(int(READY_TIMEOUT_S / 0.1)):
        time.sleep(0.1)
        try:
            if all(httpx.get(url, timeout=2.0).status_code == 200 for url in urls):
                return True
        except httpx.HTTPError:
            continue
    return False


def _run_actors(settings: ServiceSettings) -> int:
    from .localray import local_ray

    _catch_signals()
    try:
        with local_ray(settings.host, settings.port, settings.max_cells):
            _catch_signals()  # Ray's start takes SIGTERM for itself, and would abort
            from ray import serve

            from .app import build_app

            serve.run(build_app(settings, secrets.token_bytes(32)), name="specserve", route_prefix="/")
            if not _wait_ready(settings):
                print(f"specserve: not ready after {READY_TIMEOUT_S:.0f} s; stopping", file=sys.stderr)
                return 1
            print(ready_line(settings), flush=True)
            threading.Event().wait()
    except RuntimeError as error:
        print(f"specserve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


def _run_inline(settings: ServiceSettings) -> int:
    from .admin.serving import serve_admin
    from .api.app import build_api
    from .api.gate import Gate
    from .cell import inline_backend
    from .cellreport import cell_report
    from .controller import Controller
    from .exchange import Follower
    from .memory import Memory
    from .planning import PolicyPlanner

    async def main() -> None:
        gate = Gate(Credentials(settings.api_keys), settings.limits)
        controller = Controller(prepared_store(settings, time.time()))
        planner = PolicyPlanner(controller.snapshot.active.policy)
        backend = inline_backend(settings, planner)
        memory = Memory(backend.engine)
        follower = Follower(backend.cell_id, planner, lambda: cell_report(backend.engine, memory), controller)
        await follower.once()
        await backend.start()
        backend.export_telemetry()
        following = asyncio.ensure_future(follower.run())
        admin = asyncio.ensure_future(serve_admin(controller, settings))
        server = uvicorn.Server(
            uvicorn.Config(build_api(backend, gate), host=settings.host, port=settings.port, log_level="warning")
        )
        serving = asyncio.ensure_future(server.serve())
        while not server.started and not serving.done():
            await asyncio.sleep(0.05)
        if server.started:
            freeze_heap()
            print(ready_line(settings), flush=True)
        await serving
        for task in (admin, following):
            task.cancel()
        await asyncio.gather(admin, following, return_exceptions=True)
        await backend.engine.stop()

    asyncio.run(main())
    return 0
