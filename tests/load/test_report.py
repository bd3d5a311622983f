"""What a run leaves to read: a table, a page, and a plot where matplotlib is installed."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from specserve.load.cells import Cell, RivalCell
from specserve.load.client import ServerFacts
from specserve.load.figures import Pass, Sample, figures, ratios
from specserve.load.plan import Plan
from specserve.load.plot import draw
from specserve.load.report import Run, markdown, table, write_report


def _run(concurrency: tuple[int, ...] = (1, 4)) -> Run:
    cells = []
    for workload in ("copy_heavy", "mixed"):
        for level in concurrency:
            speeds = {"plain": 10.0 * level, "fixed:2": 12.0 * level, "adaptive": 20.0 * level}
            found = ratios({mode: [speed] for mode, speed in speeds.items()}, {"plain": [5.0 * level]})
            for mode, speed in speeds.items():
                one = figures(Pass((Sample((0.1, 0.2), 0.3, int(speed), 4, 8),), 1.0))
                cells.append(Cell(workload, level, mode, one, found[mode], 8, 0))
    rivals = [RivalCell("mixed", level, "plain", 5.0 * level, 0.7) for level in concurrency]
    facts = ServerFacts("tiny", 4096, "0.1.0", "bfloat16", "inline")
    return Run(Plan(url="http://host:1"), facts, cells, rivals, {"transformers": "5.24"}, "2026-01-01T00:00:00+00:00")


def test_transformers_rows_follow_ours_of_the_same_cell() -> None:
    rows = table(_run()).splitlines()
    assert len(rows) == 2 + 12 + 2
    assert [row.split("|")[3].strip() for row in rows[8:12]] == ["plain", "fixed:2", "adaptive", "transformers plain"]
    assert len({row.count("|") for row in rows}) == 1
    busy = rows[0].split("|").index(" others' cores ")
    assert (rows[10].split("|")[busy], rows[11].split("|")[busy]) == (" - ", " 0.70 ")


def test_the_page_says_what_was_run_on_what() -> None:
    page = markdown(_run(), ["adaptive is slow."], "plot.png")
    for words in (
        "tiny",
        "bfloat16",
        "inline",
        "2026-01-01",
        "specserve ",
        "- adaptive is slow.",
        "(plot.png)",
        "5.24",
    ):
        assert words in page
    assert "None was missed." in markdown(_run(), [], None)
    assert "![" not in markdown(_run(), [], None)


def test_without_matplotlib_there_is_a_sentence_and_no_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(name: str, package: str | None = None) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", refuse)
    write_report(_run(), [], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["report.md"]
    assert "matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize("concurrency", [(1,), (1, 4, 16)])
def test_the_plot_is_drawn(tmp_path: Path, concurrency: tuple[int, ...]) -> None:
    pytest.importorskip("matplotlib")
    run = _run(concurrency)
    assert draw(run.cells, run.rivals, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
