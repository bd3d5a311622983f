"""Keys are known by their hashes alone, change with their file, and a broken file changes nothing."""

import json
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from specserve.deployments import credentials
from specserve.deployments.credentials import ADMIN, ANYONE, Credentials, Limits, key_hash, load_admin_key, new_key
from specserve.service.errors import (
    BadRequestError,
    ForbiddenError,
    OverloadedError,
    QuotaExceededError,
    SpecserveError,
    UnauthenticatedError,
)

KEY, OTHER = new_key(), new_key()
ADMIN_KEY = "an admin key of this test"


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def entry(key: str = KEY, **more: Any) -> dict[str, Any]:
    return {"id": "team-a", "sha256": key_hash(key)} | more


def write(file: Path, *entries: dict[str, Any]) -> str:
    """Write a key file of another size than any before it, so that no coarse clock hides the change."""
    size = file.stat().st_size if file.exists() else 0
    file.write_text(yaml.safe_dump({"keys": list(entries)}) + f"# {'x' * (size % 97)}\n")
    return str(file)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


def test_a_key_is_recognised_with_all_that_its_entry_says(file: Path) -> None:
    limits = {"requests_per_minute": 60, "tokens_per_minute": 1000, "max_concurrent": 2}
    more = {"tiers": ["priority", "default"], "limits": limits, "min_priority": -5, "tenant": "acme"}
    found = Credentials(write(file, entry(**more))).authenticate(f"Bearer {KEY}")
    assert (found.key_id, found.tenant, found.min_priority) == ("team-a", "acme", -5)
    assert (found.tiers, found.default_tier, found.limits) == (("priority", "default"), "priority", Limits(**limits))


def test_an_entry_that_says_little_allows_little(file: Path) -> None:
    found = Credentials(write(file, entry())).authenticate(f"bearer  {KEY} ")
    assert (found.tiers, found.default_tier, found.tenant) == (("default", "flex"), "default", "team-a")
    assert (found.may_generate, found.may_read, found.may_write) == (True, False, False)


def test_json_is_a_key_file_too(file: Path) -> None:
    file.write_text(json.dumps({"keys": [entry()]}, indent=1))
    assert Credentials(str(file)).authenticate(f"Bearer {KEY}").key_id == "team-a"


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (None, "missing_api_key"), ("", "missing_api_key"), ("Bearer", "missing_api_key"), (KEY, "missing_api_key"),
        (f"Basic {KEY}", "missing_api_key"), ("Bearer \udcff", "invalid_api_key"),
        (f"Bearer {KEY}x", "invalid_api_key"),
        (f"Bearer {key_hash(KEY)}", "invalid_api_key"), (f"Bearer {ADMIN_KEY}", "invalid_api_key"),
    ],
)  # fmt: skip
def test_whoever_has_no_key_is_refused(file: Path, header: str | None, code: str) -> None:
    with pytest.raises(UnauthenticatedError) as refused:
        Credentials(write(file, entry())).authenticate(header)
    assert refused.value.code == code
    assert KEY not in refused.value.message


def test_two_keys_of_one_id_are_valid_at_a_time(file: Path) -> None:
    known = Credentials(write(file, entry() | {"sha256": [key_hash(KEY), key_hash(OTHER)]}))
    assert known.authenticate(f"Bearer {KEY}") == known.authenticate(f"Bearer {OTHER}")


@pytest.mark.parametrize(("role", "rights"), [("viewer", (False, True, False)), ("operator", (False, True, True))])
def test_a_role_decides_what_a_key_opens(file: Path, role: str, rights: tuple[bool, ...]) -> None:
    found = Credentials(write(file, entry(role=role))).authenticate(f"Bearer {KEY}")
    assert (found.may_generate, found.may_read, found.may_write) == rights


def test_the_admin_key_may_change_things_and_is_no_api_key(file: Path) -> None:
    found = Credentials(write(file, entry()), ADMIN_KEY).authenticate(f"Bearer {ADMIN_KEY}")
    assert (found, found.may_write, found.may_generate) == (ADMIN, True, False)


def test_with_an_admin_key_alone_nobody_else_gets_in() -> None:
    known = Credentials(admin_key=ADMIN_KEY)
    assert not known.open
    with pytest.raises(UnauthenticatedError):
        known.authenticate(None)


def test_without_any_key_everyone_gets_in() -> None:
    known = Credentials()
    assert known.open
    assert known.authenticate(None) is known.authenticate("Bearer whatever") is ANYONE


def test_every_hash_is_compared_in_constant_time(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    original: Callable[[bytes, bytes], bool] = credentials.hmac.compare_digest

    def counted(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return original(one, other)

    known = Credentials(write(file, entry(), entry(OTHER, id="team-b")), ADMIN_KEY)
    monkeypatch.setattr(credentials.hmac, "compare_digest", counted)
    assert known.authenticate(f"Bearer {KEY}").key_id == "team-a"
    assert len(compared) == 3


def test_a_changed_file_counts_within_a_second(file: Path) -> None:
    clock = Clock()
    known = Credentials(write(file, entry()), clock=clock)
    write(file, entry(OTHER))
    clock.now_s += 0.9
    assert known.authenticate(f"Bearer {KEY}")
    clock.now_s += 0.1
    assert known.authenticate(f"Bearer {OTHER}")
    with pytest.raises(UnauthenticatedError):
        known.authenticate(f"Bearer {KEY}")


def test_the_file_is_looked_at_once_a_second_at_most(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, looked = Clock(), []
    known = Credentials(write(file, entry()), clock=clock)
    monkeypatch.setattr(credentials, "_stamp", lambda path: looked.append(path) or known._stamp)
    for _ in range(25):
        known.authenticate(f"Bearer {KEY}")
        clock.now_s += 0.125
    assert len(looked) == 3


@pytest.mark.parametrize("broken", ["keys: [", "keys: 5", "", "keys:\n- id: a\n", None])
def test_a_broken_file_keeps_the_last_good_keys_and_says_so_once(
    file: Path, broken: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    known = Credentials(write(file, entry()), clock=clock)
    if broken is None:
        file.unlink()
    else:
        file.write_text(broken)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            clock.now_s += 1
            assert known.authenticate(f"Bearer {KEY}").key_id == "team-a"
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    write(file, entry(OTHER))
    clock.now_s += 1
    assert known.authenticate(f"Bearer {OTHER}")


@pytest.mark.parametrize(
    ("entries", "where"),
    [
        ([entry(rol="client")], "keys.0.rol"),
        ([entry() | {"sha256": KEY}], "keys.0.sha256.0"),
        ([entry() | {"sha256": []}], "keys.0.sha256"),
        ([entry() | {"sha256": [key_hash(str(i)) for i in range(3)]}], "keys.0.sha256"),
        ([entry(tiers=["gold"])], "keys.0.tiers.0"),
        ([entry(default_tier="priority")], "keys.0"),
        ([entry(limits={"requests_per_minute": 0})], "keys.0.limits.requests_per_minute"),
        ([entry(id="a/b")], "keys.0.id"),
        ([entry(), entry(OTHER)], "team-a"),
        ([entry(), entry(id="b")], "one hash is there twice"),
    ],
)
def test_a_wrong_line_is_named_and_no_key_is_shown(file: Path, entries: list[dict[str, Any]], where: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        Credentials(write(file, *entries))
    assert where in refused.value.message
    assert str(file) in refused.value.message
    assert KEY not in refused.value.message


def test_the_admin_key_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    held = tmp_path / "admin"
    held.write_text(f"{ADMIN_KEY}\n")
    environment = {"SPECSERVE_ADMIN_KEY": "another key of the environment"}
    assert load_admin_key(None, {}) is None
    assert load_admin_key(None, {"SPECSERVE_ADMIN_KEY": ""}) is None
    assert load_admin_key(None, environment) == environment["SPECSERVE_ADMIN_KEY"]
    assert load_admin_key(str(held), environment) == ADMIN_KEY
    for wrong in (tmp_path / "none", tmp_path / "empty"):
        with pytest.raises(BadRequestError):
            load_admin_key(str(wrong), environment)
        (tmp_path / "empty").touch()


@pytest.mark.parametrize(
    "error",
    [
        UnauthenticatedError("m", "c"),
        ForbiddenError("m", "p", "c"),
        QuotaExceededError("m", None),
        OverloadedError("m", 2),
    ],
)
def test_refusals_cross_processes(error: SpecserveError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), vars(again)) == (type(error), vars(error))
