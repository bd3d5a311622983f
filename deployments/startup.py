"""What stands before a service starts: its admin port, and a policy store with an active policy."""

import logging
import os
import socket
import tempfile
from pathlib import Path

from specserve.policies.document import policy_to_dict
from specserve.service.errors import StoreUnavailableError

from .lastgood import kept, last_good_file
from .policystore import Note, PolicyStore
from .settings import ServiceSettings, load_policy

LOG = logging.getLogger(__name__)
STATE_VARIABLE = "SPECSERVE_STATE"


def with_admin(settings: ServiceSettings) -> ServiceSettings:
    """Return settings that name an admin port and a policy store.

    The port is the one after the public one. Port 0 is any free one, with a store that nobody finds again; else the
    store belongs to the port, so that services of one machine keep apart and each finds its own again.
    """
    port = settings.admin_port if settings.admin_port is not None else settings.port and settings.port + 1
    if settings.policy_store is not None:
        store = Path(settings.policy_store).absolute()
    elif port == 0:
        store = Path(tempfile.mkdtemp(prefix="specserve-")) / "policies.db"
    else:
        store = state_folder() / f"policies-{port}.db"
    return settings.model_copy(update={"admin_port": port or free_port(settings.host), "policy_store": str(store)})


def state_folder() -> Path:
    """Return where what must outlive a service lies."""
    stated = os.environ.get(STATE_VARIABLE)
    if stated:
        return Path(stated).absolute()
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "specserve"


def free_port(host: str) -> int:
    """Return a port that nothing listens on."""
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        return int(probe.getsockname()[1])


def governing_name(settings: ServiceSettings) -> str:
    """Return the name and version of the policy that a prepared store, or what was kept of it, makes active."""
    assert settings.policy_store is not None
    store = PolicyStore(Path(settings.policy_store))
    try:
        desired = store.desired()
    except StoreUnavailableError:
        last = kept(store.path)
        assert last is not None
        desired = last
    active = desired.rollout.active
    return f"{desired.documents[active]['name']}, version {active}"


def prepared_store(settings: ServiceSettings, now_s: float) -> PolicyStore:
    """Return the store, with an active policy in it: one that the settings name, or the one that was active last.

    Raises: StoreUnavailableError when it cannot be read and no last good policy is known either.
    """
    assert settings.policy_store is not None
    store = PolicyStore(Path(settings.policy_store))
    document = policy_to_dict(load_policy(settings.policy))
    note = Note(now_s, "start", f"policy {settings.policy} at the start of the service")
    try:
        store.prepare(document, note)
        desired = store.desired()
        if "policy" in settings.model_fields_set and desired.documents[desired.rollout.active] != document:
            store.replace(document, note)
    except StoreUnavailableError as error:
        if kept(store.path) is None:
            hint = "move it away, or name another with --policy-store"
            raise StoreUnavailableError(f"{error.message}; {hint}") from error
        LOG.error("%s; the last good policy of %s is used", error.message, last_good_file(store.path))
    return store
