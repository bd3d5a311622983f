"""`specserve policy` against a running admin port: what it prints, and its exit codes."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from support.steered import NAMES, new_store

from specserve.cli import main
from specserve.deployments.admin.app import build_admin
from specserve.deployments.controller import Controller
from specserve.deployments.credentials import Credentials
from specserve.deployments.exchange import Follower
from specserve.deployments.planning import PolicyPlanner
from specserve.deployments.startup import free_port
from specserve.policies.document import simple_policy
from specserve.service.ports import RequestView

KEY = "an admin key of some length"


@pytest.fixture(scope="module")
def admin_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An admin port over a cell that served one request; stopped at the end."""
    port, store = free_port("127.0.0.1"), new_store(tmp_path_factory.mktemp("steering"))
    ready, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        controller, planner = Controller(store), PolicyPlanner(simple_policy("off"), 0)
        follower = Follower("cell-1", planner, dict, controller)
        await follower.once()
        planner.plan([RequestView("cmpl-1", "default", "auto", None, None, 20, 50)], NAMES, 0.0)
        app = build_admin(controller, Credentials(None, KEY))
        server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
        tasks = [asyncio.ensure_future(follower.run()), asyncio.ensure_future(server.serve())]
        while not server.started:
            await asyncio.sleep(0.01)
        ready.set()
        await asyncio.to_thread(stop.wait)
        server.should_exit = True
        await tasks[1]
        tasks[0].cancel()
        await asyncio.gather(tasks[0], return_exceptions=True)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(60)
    yield f"http://127.0.0.1:{port}"
    stop.set()
    thread.join()


@pytest.fixture
def steer(admin_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> "Steer":
    monkeypatch.setenv("SPECSERVE_ADMIN_KEY", KEY)
    return Steer(admin_url, capsys)


class Steer:
    """Calls the command and returns its exit code and what it said."""

    def __init__(self, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.url = url
        self._capsys = capsys

    def __call__(self, command: str, *arguments: str) -> tuple[int, str]:
        code = main(["policy", command, "--admin-url", self.url, *arguments])
        said = self._capsys.readouterr()
        return code, said.out + said.err


def test_a_policy_goes_from_a_file_to_active_and_back(steer: Steer, tmp_path: Path) -> None:
    file = tmp_path / "night.yaml"
    file.write_text("name: night\ntiers: {default: {law: fixed, gamma: 6}}\n")
    code, said = steer("validate", str(file))
    assert code == 0
    assert "~ /tiers/default/gamma: 6" in said
    code, said = steer("dry-run", str(file))
    assert code == 0
    assert "1 of 1 decisions change (100.0%)" in said
    assert "gamma  6        1 ###" in said
    code, said = steer("apply", str(file), "--reason", "quiet night")
    assert (code, "is active" in said) == (0, True)
    assert "name: night" in steer("show")[1]
    assert "name: fixed:3" in steer("show", "1")[1]
    assert steer("rollback", "--reason", "slower")[1].strip() == "version 1 is active"
    assert steer("activate", "2", "--canary", "5", "--tiers", "flex", "--reason", "try")[1].splitlines() == [
        "version 1 is active",
        "version 2 is a canary for 5% of the requests of flex",
    ]
    assert "canary for 5%" in steer("show")[1]
    assert steer("rollback", "--reason", "enough")[1].strip() == "version 1 is active"
    code, said = steer("history", "--limit", "3")
    assert code == 0
    assert [line.split("  ")[2] for line in said.splitlines() if line.startswith("2")] == [
        "rollback",
        "canary",
        "rollback",
    ]


def test_the_kill_switch_is_shown_until_it_is_ended(steer: Steer) -> None:
    assert steer("off", "--ttl", "15m", "--reason", "incident")[1].strip() == "speculation is off everywhere for 900 s"
    assert "override: speculation off everywhere until" in steer("show")[1]
    assert steer("off", "--end", "--reason", "over")[1].strip() == "1 overrides ended"
    assert "override:" not in steer("show")[1]


def test_a_request_is_explained(steer: Steer) -> None:
    code, said = steer("explain", "cmpl-1")
    assert code == 0
    assert "gamma 3 by draft: the policy's law for this tier is a fixed length (fixed)" in said
    assert steer("explain", "cmpl-2")[0] == 2


def test_each_kind_of_refusal_has_its_exit_code(steer: Steer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert steer("apply", "fixed:2", "--if-version", "77", "--reason", "x")[0] == 3
    assert steer("apply", "fixed:222", "--reason", "x")[0] == 2
    assert steer("apply", str(tmp_path / "none.yaml"), "--reason", "x")[0] == 2
    monkeypatch.setenv("SPECSERVE_ADMIN_KEY", "not the key")
    code, said = steer("show")
    assert (code, said.count("\n")) == (5, 1)
    steer.url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    assert steer("show")[0] == 4


@pytest.mark.parametrize(
    "command", ["show", "validate", "dry-run", "apply", "activate", "rollback", "off", "history", "explain"]
)
def test_every_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["policy", command, "--help"])
    assert f"Example: specserve policy {command}" in capsys.readouterr().out
