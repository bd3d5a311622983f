"""The built package holds what the tree holds."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("service", "policies", "deployments", "load")


@pytest.mark.skipif(not (ROOT / "service").is_dir(), reason="runs from the source tree only")
def test_every_folder_of_modules_is_listed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {path.parent.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    assert {"specserve." + ".".join(folder.parts) for folder in folders} | {"specserve"} == set(listed)


@pytest.mark.parametrize("room", [*ROOMS, "specserve"])
def test_every_room_says_that_it_is_typed(room: str) -> None:
    from importlib.resources import files

    assert files("specserve" if room == "specserve" else f"specserve.{room}").joinpath("py.typed").is_file()
