"""The store keeps every change whole: versions stay as they are, the audit grows, a kill loses nothing answered."""

import os
import random
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from specserve.deployments.policystore import Note, PolicyStore
from specserve.deployments.rollout import Canary, Rollout
from specserve.policies.document import policy_to_dict, simple_policy
from specserve.service.errors import BadRequestError, StoreUnavailableError, VersionConflictError

FIRST, SECOND, THIRD = (policy_to_dict(simple_policy(text)) for text in ("adaptive", "fixed:3", "off"))


def note(at_s: float = 10.0, reason: str = "because") -> Note:
    return Note(at_s, "ann", reason, "127.0.0.1")


@pytest.fixture
def store(tmp_path: Path) -> PolicyStore:
    made = PolicyStore(tmp_path / "deep" / "policies.db")
    made.prepare(FIRST, note(1.0))
    return made


def test_a_new_store_follows_the_first_policy_and_a_known_one_keeps_its_own(store: PolicyStore) -> None:
    assert store.desired().rollout == Rollout(1)
    store.replace(SECOND, note())
    store.prepare(THIRD, note(20.0))
    assert store.desired().documents == {2: SECOND}
    assert [entry.action for entry in store.audit(10)] == ["apply", "start"]


def test_a_replacement_is_active_audited_and_refused_when_another_came_first(store: PolicyStore) -> None:
    assert store.replace(SECOND, note(12.5, "slow mornings"), expected=1) == 2
    with pytest.raises(VersionConflictError, match="version 2, not 1"):
        store.replace(THIRD, note(), expected=1)
    assert store.desired().rollout.active == 2
    newest = store.audit(1)[0]
    assert (newest.at_s, newest.actor, newest.source, newest.reason) == (12.5, "ann", "127.0.0.1", "slow mornings")
    assert (newest.action, newest.old_version, newest.new_version, newest.result) == ("apply", 1, 2, "done")
    assert {"op": "replace", "path": "/tiers/default/law", "value": "fixed"} in newest.diff
    assert store.version(1).document == FIRST


@pytest.mark.parametrize("table", ["versions", "rollouts", "audit"])
def test_what_is_written_once_cannot_be_changed(store: PolicyStore, table: str) -> None:
    with sqlite3.connect(store.path) as connection:
        for statement in (f"DELETE FROM {table}", f"UPDATE {table} SET at_s = 0", f"UPDATE {table} SET created_s = 0"):
            with pytest.raises(sqlite3.Error, match=r"never changed|no such column"):
                connection.execute(statement)
    connection.close()


def test_a_stored_version_waits_until_it_is_rolled_out(store: PolicyStore) -> None:
    assert store.add(SECOND, note()) == 2
    assert store.desired().rollout == Rollout(1)
    canary = Canary(2, 12.5, ("flex",))
    store.roll_out(lambda now: replace(now, canary=canary), "canary", note())
    desired = store.desired()
    assert desired.rollout == Rollout(1, canary)
    assert desired.documents == {1: FIRST, 2: SECOND}
    store.roll_out(lambda now: Rollout(2), "activate", note())
    assert store.previous_active() == 1
    moved = [(entry.action, entry.old_version, entry.new_version) for entry in store.audit(2)]
    assert moved == [("activate", 1, 2), ("canary", 1, 2)]
    with pytest.raises(BadRequestError, match="no policy version 9"):
        store.roll_out(lambda now: Rollout(9), "activate", note())
    assert store.desired().rollout == Rollout(2)


def test_overrides_are_kept_until_they_are_ended(store: PolicyStore) -> None:
    whole = store.override(None, None, note(10.0))
    flex = store.override("flex", 30.0, note(11.0))
    assert store.desired().overrides == (whole, flex)
    assert [one.in_force(30.0) for one in (whole, flex)] == [True, False]
    assert store.end_overrides(whole.override_id, note(12.0)) == 1
    with pytest.raises(BadRequestError, match="no override"):
        store.end_overrides(whole.override_id, note(13.0))
    assert store.end_overrides(None, note(14.0)) == 1
    assert store.desired().overrides == ()
    assert [entry.action for entry in store.audit(4)] == ["end_override", "end_override", "override", "override"]


def test_pages_of_the_audit_and_of_versions_meet_without_gaps(store: PolicyStore) -> None:
    for _ in range(6):
        store.replace(SECOND, note())
    first = store.audit(4)
    rest = store.audit(10, before=first[-1].entry_id)
    assert [entry.entry_id for entry in first + rest] == [7, 6, 5, 4, 3, 2, 1]
    assert [version.version for version in store.versions(3, before=5)] == [4, 3, 2]


def test_a_refusal_is_on_record(store: PolicyStore) -> None:
    store.refuse("apply", note(), "the policy is bad")
    assert store.audit(1)[0].result == "refused: the policy is bad"


@pytest.mark.parametrize("damage", ["garbage", "folder", "missing", "empty", "truncated"])
def test_a_store_that_cannot_be_read_says_so_by_name(store: PolicyStore, damage: str) -> None:
    for _ in range(20):
        store.replace(SECOND, note())
    whole = store.path.read_bytes()
    for path in store.path.parent.iterdir():
        path.unlink()
    if damage == "folder":
        store.path.mkdir()
    elif damage != "missing":
        store.path.write_bytes({"garbage": b"x" * 5000, "empty": b"", "truncated": whole[: len(whole) // 2]}[damage])
    with pytest.raises(StoreUnavailableError, match=r"policies\.db"):
        store.replace(THIRD, note())
    with pytest.raises(StoreUnavailableError, match=r"policies\.db"):
        store.desired()


def test_a_store_of_a_newer_release_is_left_alone(store: PolicyStore) -> None:
    with sqlite3.connect(store.path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(StoreUnavailableError, match="schema 99"):
        store.prepare(SECOND, note())


WRITER = """
import sys
from pathlib import Path
from specserve.deployments.policystore import Note, PolicyStore
from specserve.policies.document import policy_to_dict, simple_policy

store = PolicyStore(Path(sys.argv[1]))
for number in range(int(sys.argv[2]), 100000):
    version = store.replace(policy_to_dict(simple_policy(f"fixed:{number % 60}")), Note(number, "writer", str(number)))
    print(version, number, flush=True)
"""


def test_a_kill_at_any_point_loses_no_answered_change_and_leaves_no_half_one(tmp_path: Path) -> None:
    store, chance, number = PolicyStore(tmp_path / "policies.db"), random.Random(11), 0
    store.prepare(FIRST, note())
    for _ in range(4):
        command = [sys.executable, "-c", WRITER, str(store.path), str(number)]
        answered: list[str] = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as writer:
            assert writer.stdout is not None
            for _ in range(chance.randint(2, 25)):
                answered.append(writer.stdout.readline())
            for _ in range(chance.randrange(20_000)):  # somewhere within the next change
                pass
            os.kill(writer.pid, signal.SIGKILL)
            answered += writer.stdout.readlines()
        version, number = (int(word) for word in answered[-1].split())
        desired, found = store.desired(), {one.version: one for one in store.versions(1000)}
        assert desired.rollout.active in (version, version + 1)
        assert sorted(found) == list(range(1, desired.rollout.active + 1))
        entries = [entry for entry in store.audit(1000) if entry.action == "apply"]
        assert [entry.new_version for entry in entries] == list(range(desired.rollout.active, 1, -1))
        for entry in entries:
            assert entry.new_version is not None
            assert found[entry.new_version].document["name"] == f"fixed:{int(entry.reason) % 60}"
        assert desired.documents[desired.rollout.active] == found[desired.rollout.active].document
        number += 1 + desired.rollout.active - version
