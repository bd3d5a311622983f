"""The store of policies in one SQLite file: versions that never change, the log of rollouts, overrides, the audit.

Every change is one transaction, written through to the disk before it is answered: whoever kills the process at any
moment finds a change whole or not at all. The file is opened anew for every call, so that a store that went away or
was damaged is noticed, and one that came back is used again.
"""

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from specserve.service.errors import BadRequestError, StoreUnavailableError, VersionConflictError

from .differences import differences
from .rollout import AuditEntry, Canary, Guard, Override, Rollout

Document = dict[str, Any]
_SCHEMA_VERSION = 1
_BUSY_S = 5.0
_FIXED = ("versions", "rollouts", "audit")
_SCHEMA = [
    "CREATE TABLE versions (version INTEGER PRIMARY KEY, document TEXT NOT NULL, created_s REAL NOT NULL,"
    " actor TEXT NOT NULL, reason TEXT NOT NULL)",
    "CREATE TABLE rollouts (revision INTEGER PRIMARY KEY, active INTEGER NOT NULL REFERENCES versions,"
    " canary TEXT, shadow INTEGER REFERENCES versions, at_s REAL NOT NULL)",
    "CREATE TABLE overrides (override_id INTEGER PRIMARY KEY, tier TEXT, created_s REAL NOT NULL, expires_s REAL,"
    " actor TEXT NOT NULL, reason TEXT NOT NULL, removed_s REAL)",
    "CREATE TABLE audit (entry_id INTEGER PRIMARY KEY AUTOINCREMENT, at_s REAL NOT NULL, actor TEXT NOT NULL,"
    " source TEXT NOT NULL, action TEXT NOT NULL, reason TEXT NOT NULL, old_version INTEGER, new_version INTEGER,"
    " diff TEXT NOT NULL, result TEXT NOT NULL)",
    *(
        f"CREATE TRIGGER {table}_{verb} BEFORE {verb} ON {table}"
        f" BEGIN SELECT RAISE(ABORT, '{table} are never changed'); END"
        for table in _FIXED
        for verb in ("update", "delete")
    ),
    f"PRAGMA user_version = {_SCHEMA_VERSION}",
]


@dataclass(frozen=True, slots=True)
class Note:
    """Who changes something, when (Unix time), from where and why."""

    at_s: float
    actor: str
    reason: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """One version and where it came from."""

    version: int
    document: Document
    created_s: float
    actor: str
    reason: str


@dataclass(frozen=True, slots=True)
class Desired:
    """All that is wanted now. `documents` holds the versions of the rollout; `revision` grows with every rollout."""

    revision: int
    rollout: Rollout
    documents: dict[int, Document]
    overrides: tuple[Override, ...]


class PolicyStore:
    """The file at `path`, which `prepare` makes. Raises StoreUnavailableError whenever it cannot be used."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def prepare(self, document: Document, note: Note) -> None:
        """Make the store with `document` as its first and active version, unless there is one."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreUnavailableError(f"the policy store {self.path}: {error.strerror}") from error
        with self._transaction("make") as connection:
            found = connection.execute("PRAGMA user_version").fetchone()[0]
            if found > _SCHEMA_VERSION:
                raise sqlite3.DatabaseError(f"it has schema {found}, newer than {_SCHEMA_VERSION}")
            if found:
                return
            for statement in _SCHEMA:
                connection.execute(statement)
            version = _add_version(connection, document, note)
            _add_rollout(connection, Rollout(version), note.at_s)
            _add_entry(connection, note, "start", None, version, [])

    def desired(self) -> Desired:
        """Return what is wanted now, overrides that expired included."""
        with self._transaction("read") as connection:
            return _desired(connection)

    def version(self, version: int) -> StoredVersion:
        """Return one version. Raises BadRequestError when there is none of that number."""
        with self._transaction("read") as connection:
            return _version(connection, version)

    def versions(self, limit: int, before: int | None = None) -> list[StoredVersion]:
        """Return the newest versions, those with smaller numbers than `before` when it is given."""
        query = "SELECT * FROM versions WHERE version < ? ORDER BY version DESC LIMIT ?"
        with self._transaction("read") as connection:
            rows = connection.execute(query, (_before(before), limit)).fetchall()
        return [StoredVersion(row[0], json.loads(row[1]), *row[2:]) for row in rows]

    def audit(self, limit: int, before: int | None = None) -> list[AuditEntry]:
        """Return the newest entries, those with smaller numbers than `before` when it is given."""
        query = "SELECT * FROM audit WHERE entry_id < ? ORDER BY entry_id DESC LIMIT ?"
        with self._transaction("read") as connection:
            rows = connection.execute(query, (_before(before), limit)).fetchall()
        return [AuditEntry(*(*row[:8], tuple(json.loads(row[8])), row[9])) for row in rows]

    def previous_active(self) -> int | None:
        """Return the version that was active before the present one, if another ever was."""
        query = "SELECT active FROM rollouts WHERE active != ? ORDER BY revision DESC LIMIT 1"
        with self._transaction("read") as connection:
            row = connection.execute(query, (_desired(connection).rollout.active,)).fetchone()
        return None if row is None else int(row[0])

    def add(self, document: Document, note: Note, expected: int | None = None) -> int:
        """Store a version that nobody follows yet and return its number; `expected` as in `replace`."""
        with self._transaction() as connection:
            old, active = _active(connection, expected)
            version = _add_version(connection, document, note)
            _add_entry(connection, note, "store", old, version, differences(active.documents[old], document))
            return version

    def replace(self, document: Document, note: Note, expected: int | None = None) -> int:
        """Store a version, make it the active one and return its number; a canary ends.

        Raises VersionConflictError when `expected` is given and is not the active version.
        """
        with self._transaction() as connection:
            old, now = _active(connection, expected)
            version = _add_version(connection, document, note)
            _add_rollout(connection, Rollout(version, None, now.rollout.shadow), note.at_s)
            _add_entry(connection, note, "apply", old, version, differences(now.documents[old], document))
            return version

    def roll_out(self, change: Callable[[Rollout], Rollout], action: str, note: Note) -> Rollout:
        """Replace the rollout by `change` of it and return it. Raises BadRequestError for a version there is not."""
        with self._transaction() as connection:
            now = _desired(connection)
            rollout = change(now.rollout)
            documents = {version: _version(connection, version).document for version in rollout.versions}
            old, new = _moved(now.rollout, rollout)
            documents |= now.documents
            if rollout != now.rollout:
                _add_rollout(connection, rollout, note.at_s)
            _add_entry(connection, note, action, old, new, differences(documents[old], documents[new]))
            return rollout

    def override(self, tier: str | None, expires_s: float | None, note: Note) -> Override:
        """Add an override and return it."""
        with self._transaction() as connection:
            active = _desired(connection).rollout.active
            over = "UPDATE overrides SET removed_s = expires_s WHERE removed_s IS NULL AND expires_s <= ?"
            connection.execute(over, (note.at_s,))
            query = "INSERT INTO overrides (tier, created_s, expires_s, actor, reason) VALUES (?, ?, ?, ?, ?)"
            made = connection.execute(query, (tier, note.at_s, expires_s, note.actor, note.reason))
            value = {"speculation": "off", "tier": tier, "expires_s": expires_s}
            diff = [{"op": "add", "path": f"/overrides/{made.lastrowid}", "value": value}]
            _add_entry(connection, note, "override", active, active, diff)
            assert made.lastrowid is not None
            return Override(made.lastrowid, tier, note.at_s, expires_s, note.actor, note.reason)

    def end_overrides(self, override_id: int | None, note: Note) -> int:
        """Remove one override, or all when `override_id` is None, and return how many were in force.

        Raises BadRequestError when the one named is not in force.
        """
        with self._transaction() as connection:
            now = _desired(connection)
            binding = [one.override_id for one in now.overrides if one.in_force(note.at_s)]
            ending = [one for one in binding if override_id in (None, one)]
            if override_id is not None and not ending:
                raise BadRequestError(f"no override {override_id} is in force", "override_id", "override_not_found")
            for one in ending:
                connection.execute("UPDATE overrides SET removed_s = ? WHERE override_id = ?", (note.at_s, one))
            active = now.rollout.active
            diff = [{"op": "remove", "path": f"/overrides/{one}"} for one in ending]
            _add_entry(connection, note, "end_override", active, active, diff)
            return len(ending)

    def refuse(self, action: str, note: Note, why: str) -> None:
        """Enter into the audit that something was asked for and refused."""
        with self._transaction() as connection:
            active = _desired(connection).rollout.active
            _add_entry(connection, note, action, active, None, [], f"refused: {why}")

    @contextmanager
    def _transaction(self, mode: Literal["read", "write", "make"] = "write") -> Iterator[sqlite3.Connection]:
        """Yield a connection in a transaction that is committed at the end, rolled back by an error."""
        try:
            uri = f"{self.path.absolute().as_uri()}?mode={'rwc' if mode == 'make' else 'rw'}"
            with closing(sqlite3.connect(uri, uri=True, timeout=_BUSY_S, isolation_level=None)) as connection:
                if mode == "make":
                    connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = FULL")
                connection.execute("PRAGMA foreign_keys = ON")
                connection.execute("BEGIN" if mode == "read" else "BEGIN IMMEDIATE")
                try:
                    yield connection
                except BaseException:
                    connection.execute("ROLLBACK")
                    raise
                connection.execute("COMMIT")
        except (sqlite3.Error, json.JSONDecodeError) as error:
            raise StoreUnavailableError(f"the policy store {self.path}: {error}") from error


def _before(number: int | None) -> int:
    return number if number is not None else 2**62


def _version(connection: sqlite3.Connection, version: int) -> StoredVersion:
    row = connection.execute("SELECT * FROM versions WHERE version = ?", (version,)).fetchone()
    if row is None:
        raise BadRequestError(f"there is no policy version {version}", "version", "version_not_found")
    return StoredVersion(row[0], json.loads(row[1]), *row[2:])


def _desired(connection: sqlite3.Connection) -> Desired:
    query = "SELECT revision, active, canary, shadow FROM rollouts ORDER BY revision DESC LIMIT 1"
    row = connection.execute(query).fetchone()
    if row is None:
        raise sqlite3.DatabaseError("it holds no policy")
    rollout = Rollout(row[1], _canary(row[2]), row[3])
    documents = {version: _version(connection, version).document for version in rollout.versions}
    query = "SELECT override_id, tier, created_s, expires_s, actor, reason FROM overrides WHERE removed_s IS NULL"
    overrides = [Override(*found) for found in connection.execute(f"{query} ORDER BY override_id")]
    return Desired(row[0], rollout, documents, tuple(overrides))


def _active(connection: sqlite3.Connection, expected: int | None) -> tuple[int, Desired]:
    """Return the active version and what is desired. Raises VersionConflictError when it is not the expected one."""
    now = _desired(connection)
    if expected is not None and expected != now.rollout.active:
        raise VersionConflictError(f"the active policy is version {now.rollout.active}, not {expected}")
    return now.rollout.active, now


def _moved(before: Rollout, after: Rollout) -> tuple[int, int]:
    """Return which version the requests concerned followed before the change, and which they follow after it."""
    if before.active == after.active and before.canary != after.canary:
        old, new = (now.canary.version if now.canary is not None else now.active for now in (before, after))
        return old, new
    if before.active == after.active and before.shadow != after.shadow:
        return before.shadow or before.active, after.shadow or after.active
    return before.active, after.active


def _canary(text: str | None) -> Canary | None:
    if text is None:
        return None
    fields = json.loads(text)
    return Canary(fields["version"], fields["percent"], tuple(fields["tiers"]), Guard(**fields["guard"]))


def _add_version(connection: sqlite3.Connection, document: Document, note: Note) -> int:
    query = "INSERT INTO versions (document, created_s, actor, reason) VALUES (?, ?, ?, ?)"
    made = connection.execute(query, (json.dumps(document), note.at_s, note.actor, note.reason))
    assert made.lastrowid is not None
    return made.lastrowid


def _add_rollout(connection: sqlite3.Connection, rollout: Rollout, at_s: float) -> None:
    canary = None if rollout.canary is None else json.dumps(asdict(rollout.canary))
    query = "INSERT INTO rollouts (active, canary, shadow, at_s) VALUES (?, ?, ?, ?)"
    connection.execute(query, (rollout.active, canary, rollout.shadow, at_s))


def _add_entry(
    connection: sqlite3.Connection,
    note: Note,
    action: str,
    old: int | None,
    new: int | None,
    diff: list[Document],
    result: str = "done",
) -> None:
    query = (
        "INSERT INTO audit (at_s, actor, source, action, reason, old_version, new_version, diff, result)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
    )
    fields = (note.at_s, note.actor, note.source, action, note.reason, old, new, json.dumps(diff), result)
    connection.execute(query, fields)
