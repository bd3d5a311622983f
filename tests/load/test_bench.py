"""Whole bench runs: against a fake server, and with stand-ins for the processes that a bench starts."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specserve.cli import main
from specserve.load import bench, lineup
from specserve.load.plan import SWEEP_CONCURRENCY, SWEEP_MODES
from specserve.load.prompts import WORKLOADS
from specserve.load.rival import rival_command
from specserve.load.server import serve_command

CELL_KEYS = {
    "workload", "concurrency", "mode", "tokens_per_s", "tokens_per_round", "ttft_ms_p50", "ttft_ms_p95", "itl_ms_p50",
    "itl_ms_p95", "tpot_ms_p50", "tpot_ms_p95", "e2e_ms_p50", "goodput_rps", "rss_mb", "gpu_mb", "ratio_to_plain",
    "ratio_to_best_fixed", "ratio_to_transformers", "differing", "num_accepted", "draft_efficiency",
}  # fmt: skip
QUICK = ["bench", "--prompts", "2", "--max-tokens", "8", "--repeats", "2"]


@pytest.fixture
def no_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake server's speed means nothing."""
    monkeypatch.setattr("specserve.load.budgets.PLAIN_BUDGET", 0.0)
    monkeypatch.setattr("specserve.load.budgets.FIXED_BUDGET", 0.0)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch, serve_program: list[str], rival_program: list[str]) -> dict[str, Any]:
    """Both programs instead of the real ones; a test may change their commands."""
    commands: dict[str, Any] = {"serve": serve_program, "more": [], "flags": [], "rival": rival_program}

    def command(model: str | None, placement: str, port: int, flags: Sequence[str] = ()) -> list[str]:
        commands["flags"].append(tuple(flags))
        return [*commands["serve"], str(port), *commands["more"], *flags]

    monkeypatch.setattr(lineup, "serve_command", command)
    monkeypatch.setattr(bench, "rival_command", lambda model: commands["rival"])
    return commands


def _modes(fake: Any) -> list[str]:
    return [body["speculation"]["mode"] + str(body["speculation"].get("max_draft_tokens", "")) for body in fake.bodies]


@pytest.mark.usefixtures("no_budgets")
def test_modes_take_turns_and_the_first_one_changes(url: str, fake: Any) -> None:
    modes = "plain,fixed:2,adaptive"
    assert main([*QUICK, "--url", url, "--modes", modes, "--workloads", "open_ended", "--prompts", "1"]) == 0
    warm_up, first, second = (_modes(fake)[start : start + 3] for start in (0, 3, 6))
    assert warm_up == first == ["off", "on2", "auto"]
    assert second == ["on2", "auto", "off"]


@pytest.mark.usefixtures("no_budgets")
def test_a_pass_has_as_many_requests_as_are_to_be_in_flight(url: str, fake: Any) -> None:
    main([*QUICK, "--url", url, "--modes", "plain", "--workloads", "mixed", "--concurrency", "1,3"])
    assert len(fake.bodies) == (1 + 2 * 2) + (3 + 2 * 3)


@pytest.mark.usefixtures("no_budgets")
def test_the_json_keeps_its_contract(url: str, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    assert main([*QUICK, "--url", url, "--modes", "plain,fixed:4,adaptive", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert {"commit", "hardware", "model", "dtype", "cells"} <= set(found)
    assert {"cpu", "cores"} <= set(found["hardware"])
    assert (found["model"], found["dtype"], found["placement"], found["version"]) == ("fake", "bfloat16", "inline", "0")
    assert [set(cell) >= CELL_KEYS for cell in found["cells"]] == [True] * 6
    assert {cell["ratio_to_plain"] for cell in found["cells"] if cell["mode"] == "plain"} == {1.0}
    assert {cell["differing"] for cell in found["cells"]} == {0}
    assert {cell["tokens_per_round"] for cell in found["cells"]} == {1.0, 3.0}


@pytest.mark.usefixtures("no_budgets")
def test_a_changed_text_fails_the_run(url: str, fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fake.changed_text_in = "auto"
    assert main([*QUICK, "--url", url, "--workloads", "open_ended"]) == 1
    assert "adaptive differs from plain's text in 2 of 2 requests" in capsys.readouterr().err
    assert main([*QUICK, "--url", url, "--workloads", "open_ended", "--temperature", "0.8"]) == 0


def test_a_missed_ratio_fails_the_run(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("specserve.load.budgets.PLAIN_BUDGET", 1e9)
    assert main([*QUICK, "--url", url, "--workloads", "open_ended"]) == 1
    assert "of plain on open_ended at concurrency 1; the budget is" in capsys.readouterr().err


@pytest.mark.usefixtures("no_budgets")
def test_check_fails_what_was_not_measured(url: str) -> None:
    quick = [*QUICK, "--url", url, "--workloads", "open_ended"]
    assert main([*quick, "--modes", "plain,adaptive"]) == 0
    assert main([*quick, "--modes", "plain,adaptive", "--check"]) == 1
    assert main([*quick, "--modes", "plain,fixed:2,adaptive", "--check"]) == 0


@pytest.mark.usefixtures("no_budgets", "stand_ins")
def test_one_command_starts_a_server_and_measures_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bench.json"
    arguments = [*QUICK, "--workloads", "open_ended", "--concurrency", "1,2", "--against", "transformers"]
    assert main([*arguments, "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert all(cell["rss_mb"] > 1 for cell in found["cells"])
    theirs = {(one["concurrency"], one["setting"]): one["tokens_per_s"] for one in found["transformers"]["cells"]}
    assert theirs == {(1, "plain"): 20.0, (1, "prompt_lookup"): 40.0, (2, "plain"): 40.0}
    for cell in found["cells"]:
        best = 20.0 if cell["concurrency"] == 1 and cell["mode"] == "plain" else 40.0
        assert cell["ratio_to_transformers"] == pytest.approx(cell["tokens_per_s"] / best)
    said = capsys.readouterr()
    assert "open_ended concurrency 2 adaptive:" in said.err
    assert "transformers prompt_lookup" in said.out


def children() -> set[int]:
    """Return the ids of this process's children, ended ones that nobody waited for included."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            found.add(int(stat.parent.name))
    return found


def test_a_server_that_dies_is_reported_and_leaves_nothing(
    stand_ins: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    stand_ins["more"] = ["--die-after", "4"]
    before = children()
    assert main([*QUICK, "--json", str(tmp_path / "bench.json")]) == 2
    said = capsys.readouterr().err
    assert "specserve bench: " in said
    assert "loading ..." in said
    assert "Traceback" not in said
    assert children() <= before


def test_a_server_that_never_gets_ready_is_reported(
    stand_ins: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    stand_ins["serve"] = ["sh", "-c", "echo no such model >&2; exit 2"]
    path = tmp_path / "bench.json"
    assert main([*QUICK, "--json", str(path)]) == 2
    assert not path.exists()
    said = capsys.readouterr().err
    assert "exit code 2 before it was ready" in said
    assert "no such model" in said


def test_a_rival_that_fails_is_reported(stand_ins: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    stand_ins["rival"] = [*stand_ins["rival"], "broken"]
    assert main([*QUICK, "--against", "transformers"]) == 2
    said = capsys.readouterr().err
    assert "no memory" in said
    assert "the rival's traceback" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--url", "localhost"], "looks like http"),
        (["--url", "http://127.0.0.1:9"], "No server answers"),
        (["--modes", "plain,sometimes"], "sometimes"),
        (["--workloads", "poetry"], "poetry"),
        (["--json", "no/such/folder/bench.json"], "cannot be written"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], stand_ins: dict[str, Any]
) -> None:
    stand_ins["serve"] = ["false"]
    assert main(["bench", *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("wrong", [["--concurrency", "0"], ["--concurrency", "1,x"], ["--temperature", "3"]])
def test_wrong_numbers_are_refused_by_the_command_line(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *wrong])
    assert ended.value.code == 2
    assert wrong[0] in capsys.readouterr().err


def test_a_sweep_is_everything_unless_something_else_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Any] = []

    def stop_at_the_plan(plan: Any) -> None:
        plans.append(plan)
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "measured", stop_at_the_plan)
    assert main(["bench", "--sweep"]) == 130
    assert main(["bench", "--sweep", "--concurrency", "2"]) == 130
    assert (plans[0].workloads, plans[0].concurrency, plans[0].modes) == (WORKLOADS, SWEEP_CONCURRENCY, SWEEP_MODES)
    assert (plans[1].concurrency, plans[1].modes) == ((2,), SWEEP_MODES)


def test_the_commands_name_the_model() -> None:
    assert serve_command("tiny", "inline", 5)[2:] == [
        "specserve.cli", "serve", "tiny", "--placement", "inline", "--port", "5", "--admin-port", "0",
    ]  # fmt: skip
    assert "tiny" not in serve_command(None, "actors", 5)
    assert rival_command("tiny")[-1] == "tiny"


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    assert "specserve bench --sweep" in capsys.readouterr().out
