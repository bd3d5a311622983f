"""Each proposer by itself: its server, its turns, the table of all of them, and what is refused."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specserve.cli import main
from specserve.load import lineup
from specserve.load.budgets import doubts, outdone
from specserve.load.cells import Cell, cells_of
from specserve.load.figures import Figures, Pass, Ratios, Sample, figures
from specserve.load.ranking import ranking, standings, tokens_by_length

FIGURES: Figures = figures(Pass((Sample((0.1, 0.2), 0.2, 10, 4, 8),), 1.0))
QUICK = ["bench", "--prompts", "1", "--max-tokens", "8", "--repeats", "1", "--concurrency", "1"]


def _cell(proposer: str | None, mode: str, workload: str = "code", concurrency: int = 1, **changed: Any) -> Cell:
    speed = changed.get("tokens_per_s", 10.0)
    found = replace(FIGURES, **{"tokens_per_s": speed, **changed})
    return Cell(workload, concurrency, mode, found, Ratios(speed / 10.0), 8, 0, proposer)


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch, serve_program: list[str]) -> list[tuple[str, ...]]:
    """The flags of every server that was started; each is a stand-in that offers what `--proposers` names."""
    started: list[tuple[str, ...]] = []

    def command(model: str | None, placement: str, port: int, more: Sequence[str] = ()) -> list[str]:
        started.append((placement, *more))
        return [*serve_program, str(port), *more]

    monkeypatch.setattr(lineup, "serve_command", command)
    return started


def test_a_proposer_stands_at_its_fastest_length_in_each_place() -> None:
    cells = [
        _cell(None, "plain", rss_mb=100.0),
        _cell("suffix", "fixed:2", tokens_per_s=20.0, rss_mb=103.0),
        _cell("suffix", "fixed:8", tokens_per_s=30.0, rss_mb=110.0, tokens_per_round=3.5, draft_efficiency=0.25),
        _cell("suffix", "fixed:2", "repeated", 8, tokens_per_s=50.0, rss_mb=104.0),
        _cell("suffix", "fixed:8", "repeated", 8, tokens_per_s=40.0, rss_mb=104.0),
    ]
    plain, suffix = standings(cells)
    assert (plain.proposer, plain.extra_mb) == (None, None)
    assert (suffix.proposer, suffix.extra_mb) == ("suffix", 10.0)
    assert {place: cell.mode for place, cell in suffix.fastest.items()} == {
        (1, "code"): "fixed:8",
        (8, "repeated"): "fixed:2",
    }
    assert ranking(cells).splitlines() == [
        "| proposer | MB | code, 1 at once | repeated, 8 at once |",
        "| --- | --- | --- | --- |",
        "| plain | - | 10 tokens/s | - |",
        "| suffix | +10 | 3.00 (8: 3.50, 25%) | 5.00 (2: 1.67, 50%) |",
    ]
    assert tokens_by_length(cells).splitlines()[2:] == ["| suffix | 2: 1.67, 8: 3.50 | 2: 1.67, 8: 1.67 |"]


def test_memory_is_unknown_where_servers_were_not_ours() -> None:
    _, suffix = standings([_cell(None, "plain"), _cell("suffix", "fixed:2")])
    assert suffix.extra_mb is None
    assert suffix.as_json()["fastest"][0]["mode"] == "fixed:2"


def test_a_proposers_passes_become_cells_that_name_it() -> None:
    one = Pass((Sample((0.1, 0.2), 0.2, 10, 4, 8, text="a"),), 1.0)
    cells, _ = cells_of("code", 1, {"plain": [one], "eagle3:tree fixed:4": [replace(one, wall_s=0.5)]}, greedy=True)
    assert [(cell.proposer, cell.mode, cell.name) for cell in cells] == [
        (None, "plain", "plain"),
        ("eagle3:tree", "fixed:4", "eagle3:tree fixed:4"),
    ]
    assert cells[1].ratios == Ratios(2.0, None)


def test_suffix_decoding_must_not_emit_less_than_prompt_lookup_where_texts_come_again() -> None:
    lookup = [
        _cell("prompt_lookup", "fixed:4", "repeated", tokens_per_round=3.0),
        _cell("prompt_lookup", "fixed:8", "repeated", tokens_per_round=4.0),
    ]
    behind = _cell("suffix:chain", "fixed:8", "repeated", tokens_per_round=3.9)
    level = _cell("suffix:tree", "fixed:8", "repeated", tokens_per_round=4.0)
    assert outdone([*lookup, behind]) == [
        "suffix emits 3.90 tokens a round on repeated at concurrency 1, prompt_lookup 4.00."
    ]
    assert outdone([*lookup, behind, level]) == []
    assert outdone([replace(one, workload="code") for one in (*lookup, behind)]) == []
    assert len(outdone(lookup, strict=True)) == 1


def test_a_proposers_text_must_be_plains() -> None:
    differing = replace(_cell("draft", "fixed:4"), differing=2)
    assert outdone([_cell(None, "plain"), differing]) == [
        "draft fixed:4 differs from plain's text in 2 of 8 requests on code at concurrency 1; the budget is 0."
    ]


def test_prompts_of_a_session_may_be_found_in_the_prefix_cache() -> None:
    assert doubts([_cell("suffix", "fixed:2", "repeated", cached_prompt_tokens=64)], []) == []
    assert len(doubts([_cell("suffix", "fixed:2", "code", cached_prompt_tokens=64)], [])) == 1


def test_each_proposer_has_a_server_of_its_own_and_plain_one_without_any(
    flags: list[tuple[str, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bench.json"
    proposers = ["--proposers", "prompt_lookup,suffix:chain,prediction", "--layer-skip", "3,5"]
    where = ["--json", str(path), "--report", str(tmp_path / "out"), "--workloads", "copy_heavy,code"]
    assert main([*QUICK, *proposers, *where, "--modes", "fixed:2,fixed:4"]) == 0
    skip = ("inline", "--layer-skip", "3,5", "--proposers")
    assert flags == [
        (*skip, ""),
        (*skip, "prompt_lookup"),
        (*skip, "suffix", "--suffix-drafts", "chain"),
        (*skip, "prediction"),
    ]
    found = json.loads(path.read_text())
    assert [(one["workload"], one["proposer"], one["mode"]) for one in found["cells"]] == [
        (workload, proposer, mode)
        for workload, names in (
            ("copy_heavy", (None, "prompt_lookup", "suffix:chain", "prediction")),
            ("code", (None, "prompt_lookup", "suffix:chain")),
        )
        for proposer in names
        for mode in (("plain",) if proposer is None else ("fixed:2", "fixed:4"))
    ]
    assert [one["proposer"] for one in found["proposers"]] == [None, "prompt_lookup", "suffix:chain", "prediction"]
    assert all(one["extra_mb"] is not None for one in found["proposers"][1:])
    said = capsys.readouterr()
    assert "started: a server with suffix:chain" in said.err
    assert "| suffix:chain |" in said.out
    page = (tmp_path / "out" / "report.md").read_text()
    assert said.out.strip() in page
    assert "each proposer by itself" in page


@pytest.mark.usefixtures("flags")
def test_all_is_what_can_be_built_in_both_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--proposers", "all", "--workloads", "open_ended", "--modes", "fixed:4"]) == 0
    rows = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows[:6] == ["plain", "prompt_lookup", "suffix:tree", "suffix:chain", "draft", "draft:int8"]


def test_a_running_server_is_measured_with_what_it_offers(
    url: str, fake: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.proposers = ("draft", "suffix")
    quick = [*QUICK, "--url", url, "--workloads", "open_ended", "--modes", "fixed:4"]
    assert main([*quick, "--proposers", "all"]) == 0
    asked = [body["speculation"].get("proposer") for body in fake.bodies]
    assert asked == [None, "draft", "suffix"] * 2
    assert "| draft | - |" in capsys.readouterr().out
    assert main([*quick, "--proposers", "eagle3"]) == 2
    assert "no proposer 'eagle3', but draft, suffix" in capsys.readouterr().err


def test_servers_that_would_not_fit_into_memory_are_not_started(
    flags: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lineup, "available_mb", lambda: 1.0)
    assert main([*QUICK, "--proposers", "prompt_lookup,suffix"]) == 2
    assert "too little for 2 more at once" in capsys.readouterr().err
    assert len(flags) == 1


@pytest.mark.usefixtures("flags")
def test_a_plug_in_is_asked_for_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def note(mode: str, proposer: str | None = None) -> dict[str, Any]:
        asked.append(str(proposer))
        return {"mode": "off"}

    monkeypatch.setattr(lineup, "speculation", note)
    assert main([*QUICK, "--proposers", "my.module:Class", "--workloads", "open_ended", "--modes", "fixed:4"]) == 0
    assert asked == ["None", "class"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--proposers", ""], "names no proposer"),
        (["--proposers", "oracle"], "oracle cannot be built"),
        (["--proposers", "draft,eagle:chain"], "eagle:chain cannot be built"),
        (["gemma-3-270m", "--proposers", "draft"], "draft cannot be built"),
        (["--proposers", "suffix", "--sweep"], "--sweep"),
        (["--proposers", "suffix", "--proposer", "draft"], "--proposer"),
        (["--proposers", "suffix", "--modes", "plain"], "a mode that speculates"),
        (["--proposers", "suffix", "--placement", "actors"], "--placement inline"),
        (["--proposers", "suffix:chain", "--url", "http://127.0.0.1:9"], "when it was started"),
        (["--proposers", "suffix", "--draft", "x", "--url", "http://127.0.0.1:9"], "when it was started"),
        (["--proposers", "suffix", "--workloads", "poetry"], "poetry"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], flags: list[tuple[str, ...]]
) -> None:
    assert main(["bench", *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) == 1
    assert flags == []
