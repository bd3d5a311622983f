"""`specserve keys` makes keys that open the service, and lists what a file of them allows."""

from pathlib import Path

import pytest
import yaml

from specserve.cli import main
from specserve.deployments.credentials import Credentials


def made(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    """Return a fresh key and its entry as printed."""
    assert main(["keys", "new", *arguments]) == 0
    shown = capsys.readouterr().out.splitlines()
    key = next(line for line in shown if line.startswith("sk-"))
    return key, "\n".join(shown[next(i for i, line in enumerate(shown) if line.startswith("- id")) :])


def test_the_entry_printed_opens_the_service_to_the_key_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key, entry = made(capsys, "--id", "team-a", "--tier", "priority", "--tokens-per-minute", "500")
    assert key not in entry
    file = tmp_path / "keys.yaml"
    file.write_text(f"keys:\n{entry}\n")
    found = Credentials(str(file)).authenticate(f"Bearer {key}")
    assert (found.key_id, found.default_tier, found.tiers) == ("team-a", "priority", ("priority", "default", "flex"))
    assert (found.limits.tokens_per_minute, found.limits.requests_per_minute) == (500, None)
    assert main(["keys", "show", str(file)]) == 0
    listed = capsys.readouterr().out
    assert "team-a" in listed
    assert "500" in listed
    assert yaml.safe_load(entry)[0]["sha256"][0] not in listed


def test_no_two_keys_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert made(capsys, "--id", "a")[0] != made(capsys, "--id", "a")[0]


def test_a_name_that_no_file_may_hold_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new", "--id", "a/b"]) == 2
    assert "a/b" in capsys.readouterr().err
    assert main(["keys", "show", "no-such-file.yaml"]) == 2
    assert "no-such-file.yaml" in capsys.readouterr().err
