"""`specserve serve`: start everything in the foreground, say when it is ready, stop everything on Ctrl-C."""

import argparse
import asyncio
import logging
import secrets
import signal
import sys
import threading

import httpx
import uvicorn

from .settings import ServiceSettings

READY_TIMEOUT_S = 180.0


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted and return the exit code."""
    settings = settings_from(args)
    print(f"specserve: starting {settings.model_id} ({settings.placement}) ...", file=sys.stderr, flush=True)
    return _run_inline(settings) if settings.placement == "inline" else _run_actors(settings)


def settings_from(args: argparse.Namespace) -> ServiceSettings:
    """Return the settings that the command line (over a `--config` file) asks for."""
    given = {
        "model": args.model,
        "draft": args.draft,
        "dtype": args.dtype,
        "placement": args.placement,
        "host": args.host,
        "port": args.port,
        "policy": args.policy,
        "max_model_len": args.max_model_len,
        "num_pages": args.num_pages,
    }
    if args.proposers is not None:
        given["proposers"] = tuple(name for name in args.proposers.split(",") if name)
    return ServiceSettings.model_validate({name: value for name, value in given.items() if value is not None})


def ready_line(settings: ServiceSettings) -> str:
    """Return what is printed once `/ready` answers 200."""
    url = f"http://{settings.host}:{settings.port}"
    return f"specserve: ready at {url}  (model {settings.model_id}, policy {settings.policy}); Ctrl-C stops it"


def _wait_ready(settings: ServiceSettings, stopped: threading.Event) -> bool:
    url = f"http://{settings.host}:{settings.port}/ready"
    for _ in range(int(READY_TIMEOUT_S / 0.1)):
        if stopped.wait(0.1):
            return False
        try:
            if httpx.get(url, timeout=2.0).status_code == 200:
                return True
        except httpx.HTTPError:
            continue
    return False


def _run_actors(settings: ServiceSettings) -> int:
    from .localray import start_local_ray

    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    start_local_ray()
    import ray
    from ray import serve

    from .app import build_app

    try:
        serve.start(http_options={"host": settings.host, "port": settings.port})
        serve.run(build_app(settings, secrets.token_bytes(32)), name="specserve", route_prefix="/")
        if not _wait_ready(settings, stopped):
            print("specserve: stopped before it was ready", file=sys.stderr)
            return 1
        print(ready_line(settings), flush=True)
        stopped.wait()
        print("specserve: stopping ...", file=sys.stderr, flush=True)
        return 0
    finally:
        if ray.is_initialized():
            serve.shutdown()
            ray.shutdown()


def _run_inline(settings: ServiceSettings) -> int:
    from .api.app import build_api
    from .cell import inline_backend

    async def main() -> None:
        backend = inline_backend(settings)
        await backend.start()
        server = uvicorn.Server(
            uvicorn.Config(build_api(backend), host=settings.host, port=settings.port, log_level="warning")
        )
        serving = asyncio.ensure_future(server.serve())
        while not server.started and not serving.done():
            await asyncio.sleep(0.05)
        if server.started:
            print(ready_line(settings), flush=True)
        await serving
        await backend.engine.stop()

    asyncio.run(main())
    return 0
