"""At a start the policy that is named governs, else the one that governed last; never silently another."""

from pathlib import Path

import pytest

from specserve.deployments.controller import Controller
from specserve.deployments.policystore import Note, PolicyStore
from specserve.deployments.settings import ServiceSettings
from specserve.deployments.startup import STATE_VARIABLE, prepared_store, with_admin
from specserve.policies.document import policy_to_dict, simple_policy
from specserve.service.errors import StoreUnavailableError

NOTE = Note(5.0, "ann", "x")


def name_after_start(path: Path, **stated: str) -> str:
    store = prepared_store(ServiceSettings(policy_store=str(path), **stated), 10.0)
    return str(Controller(store, lambda: 20.0).snapshot.active.policy.name)


def test_the_last_policy_governs_again_unless_another_is_named(tmp_path: Path) -> None:
    path = tmp_path / "policies.db"
    assert name_after_start(path) == "adaptive"
    PolicyStore(path).replace(policy_to_dict(simple_policy("fixed:6")), NOTE)
    assert name_after_start(path) == "fixed:6"
    assert name_after_start(path, policy="off") == "off"
    assert name_after_start(path) == "off"
    assert [entry.action for entry in PolicyStore(path).audit(9)] == ["apply", "apply", "start"]


def test_a_damaged_store_starts_with_the_last_good_policy_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "policies.db"
    name_after_start(path, policy="fixed:6")
    for file in tmp_path.glob("policies.db*"):
        if not file.name.endswith(".json"):
            file.unlink()
    path.write_bytes(b"not a database" * 100)
    assert name_after_start(path, policy="off") == "fixed:6"
    for kept in tmp_path.glob("*.json"):
        kept.unlink()
    with pytest.raises(StoreUnavailableError, match=r"policies\.db.*--policy-store"):
        name_after_start(path, policy="off")


def test_overrides_and_a_canary_survive_in_the_last_good_policy(tmp_path: Path) -> None:
    path = tmp_path / "policies.db"
    name_after_start(path)
    store = PolicyStore(path)
    store.override("flex", 1e9, NOTE)
    before = Controller(store, lambda: 20.0)
    path.write_bytes(b"")
    after = Controller(store, lambda: 20.0)
    assert after.store_error is not None
    assert (after.desired, after.snapshot) == (before.desired, before.snapshot)


def test_each_admin_port_has_its_own_store_and_port_0_one_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path))
    usual = with_admin(ServiceSettings())
    assert (usual.admin_port, usual.policy_store) == (8001, str(tmp_path / "policies-8001.db"))
    assert with_admin(ServiceSettings(port=9000)).admin_port == 9001
    assert with_admin(ServiceSettings(admin_port=7)).policy_store == str(tmp_path / "policies-7.db")
    one, other = (with_admin(ServiceSettings(admin_port=0)) for _ in range(2))
    assert one.policy_store != other.policy_store
    assert "policy" not in one.model_fields_set
