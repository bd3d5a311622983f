"""The README stays short, and what it tells people to type works."""

import re
import shlex
from pathlib import Path

import pytest

from specserve.cli import parser

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
TARGETS = sorted(set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.M)))
COMMANDS = sorted(set(re.findall(r"^(?:\.venv/bin/)?(specserve [^#\n]+)", README, re.M)))


def test_it_is_at_most_120_lines() -> None:
    assert len(README.splitlines()) <= 120


def test_it_shows_commands() -> None:
    assert COMMANDS
    assert {"run", "test"} <= set(TARGETS)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_parses(command: str) -> None:
    assert parser().parse_args(shlex.split(command)[1:]).run


@pytest.mark.parametrize("target", TARGETS)
def test_each_make_target_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)
