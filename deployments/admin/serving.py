"""Listening on the admin port, in whatever process the controller lives in."""

import asyncio
import logging
import os
import socket

import uvicorn

from ..controller import Controller
from ..credentials import Credentials, load_admin_key
from ..settings import ServiceSettings
from .app import build_admin

LOG = logging.getLogger(__name__)
_TRY_AGAIN_S = 0.2


async def serve_admin(controller: Controller, settings: ServiceSettings) -> None:
    """Serve the admin API until cancelled or told to stop by a signal.

    A port that is taken, as by a controller that is only just ending, is tried again and again.
    """
    credentials = Credentials(settings.api_keys, load_admin_key(settings.admin_key_file, os.environ))
    assert settings.admin_port is not None
    listening = await _listen(settings.host, settings.admin_port)
    app = build_admin(controller, credentials)
    config = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=2)
    await uvicorn.Server(config).serve(sockets=[listening])


async def _listen(host: str, port: int) -> socket.socket:
    family, told = socket.AF_INET6 if ":" in host else socket.AF_INET, False
    while True:
        try:
            return socket.create_server((host, port), family=family)
        except OSError as error:
            if not told:
                LOG.warning("the admin port %s:%d is not free yet: %s", host, port, error.strerror)
            told = True
            await asyncio.sleep(_TRY_AGAIN_S)
