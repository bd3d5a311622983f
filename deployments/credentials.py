"""Who calls: keys from a file of hashes, which is read again when it changes, and the admin key.

The file is YAML or JSON: `keys:` and a list of `KeyEntry`. Keys are random and 256 bits long (`new_key`), so one
SHA-256 hides them as well as a slow hash would.
"""

import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from specserve.service.errors import BadRequestError, UnauthenticatedError

Role = Literal["client", "viewer", "operator"]
Tier = Literal["priority", "default", "flex"]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=1)]

ADMIN_KEY_VARIABLE = "SPECSERVE_ADMIN_KEY"
MIN_ADMIN_KEY_CHARS = 16
CHECK_EVERY_S = 1.0
_log = logging.getLogger(__name__)


class Limits(BaseModel):
    """What one key may use; None is without limit. Tokens are those of prompts and outputs."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    max_concurrent: Count | None = Field(None, description="Choices generated at a time.")


class KeyEntry(BaseModel):
    """One caller. Two hashes are two keys that are valid at a time, so that one can be replaced without a gap."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Name
    sha256: Annotated[
        tuple[Hash, ...],
        BeforeValidator(lambda given: (given,) if isinstance(given, str) else given),
        Field(min_length=1, max_length=2),
    ]
    role: Role = Field("client", description="client: public API; viewer: reads the admin API; operator: changes it.")
    tiers: tuple[Tier, ...] = Field(("default", "flex"), min_length=1)
    default_tier: Tier | None = Field(None, description="What service_tier `auto` means; None is the first of `tiers`.")
    limits: Limits = Limits()
    priority_limits: Limits = Field(Limits(), description="What of it is served as priority; the rest as default.")
    min_priority: int = Field(0, description="The lowest `priority` number, the earliest place, a request may ask for.")
    tenant: Name | None = Field(None, description="Keys of one tenant share cached prefixes; None is the key alone.")

    @model_validator(mode="after")
    def _default_tier_is_allowed(self) -> Self:
        if self.default_tier is not None and self.default_tier not in self.tiers:
            raise ValueError(f"default_tier {self.default_tier} is not among the tiers")
        return self


class KeyFile(BaseModel):
    """The whole file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    keys: tuple[KeyEntry, ...]

    @model_validator(mode="after")
    def _nothing_is_there_twice(self) -> Self:
        ids = [entry.id for entry in self.keys]
        hashes = [each for entry in self.keys for each in entry.sha256]
        twice = next((name for name in ids if ids.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"the id {twice} is there twice; two keys of one id are two hashes of one entry")
        if len(set(hashes)) < len(hashes):
            raise ValueError("one hash is there twice")
        return self


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller whose key was recognised. `key_id` is None where no keys are configured, and is what logs may say."""

    key_id: str | None
    roles: frozenset[Role]
    tiers: tuple[Tier, ...]
    default_tier: Tier
    limits: Limits
    priority_limits: Limits
    min_priority: int | None
    tenant: str

    @property
    def may_generate(self) -> bool:
        """True for those who may use the public API."""
        return "client" in self.roles

    @property
    def may_read(self) -> bool:
        """True for those who may look at the admin API."""
        return "viewer" in self.roles

    @property
    def may_write(self) -> bool:
        """True for those who may change anything through the admin API."""
        return "operator" in self.roles


_ROLES: Mapping[Role, frozenset[Role]] = {
    "client": frozenset({"client"}),
    "viewer": frozenset({"viewer"}),
    "operator": frozenset({"viewer", "operator"}),
}
_EVERY_TIER: tuple[Tier, ...] = ("default", "priority", "flex")
ANYONE = Principal(
    None, frozenset({"client", "viewer", "operator"}), _EVERY_TIER, "default", Limits(), Limits(), None, ""
)
ADMIN = Principal("admin", _ROLES["operator"], _EVERY_TIER, "default", Limits(), Limits(), None, "")


class Credentials:
    """The keys that are valid now.

    A changed file counts within a second. One that cannot be read, or is wrong, changes nothing and is logged. With
    neither a file nor an admin key everyone is `ANYONE`.
    """

    def __init__(
        self, file: str | None = None, admin_key: str | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._file = None if file is None else Path(file)
        self._clock = clock
        self._admin = () if admin_key is None else ((_digest(admin_key), ADMIN),)
        self._known: tuple[tuple[bytes, Principal], ...] = ()
        self._stamp: tuple[int, int, int] | None = None
        self._checked_s = clock()
        if self._file is not None:
            self._stamp = _stamp(self._file)
            self._known = _principals(load_key_file(self._file))

    @property
    def open(self) -> bool:
        """True when no key of any kind is configured."""
        return self._file is None and not self._admin

    def authenticate(self, authorization: str | None) -> Principal:
        """Return who sent this `Authorization` header. Raises UnauthenticatedError.

        The time taken tells nothing about any key: every hash is compared, each in constant time.
        """
        if self.open:
            return ANYONE
        self._refresh()
        scheme, _, token = (authorization or "").strip().partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise UnauthenticatedError("an API key is needed: send `Authorization: Bearer KEY`", "missing_api_key")
        digest = _digest(token.strip())
        found: Principal | None = None
        for known, principal in (*self._known, *self._admin):
            if hmac.compare_digest(known, digest):
                found = principal
        if found is None:
            raise UnauthenticatedError("this API key is not known here")
        return found

    def _refresh(self) -> None:
        now_s = self._clock()
        if self._file is None or now_s - self._checked_s < CHECK_EVERY_S:
            return
        self._checked_s = now_s
        stamp = _stamp(self._file)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._known = _principals(load_key_file(self._file))
        except BadRequestError as error:
            _log.error("the keys stay as they were: %s", error.message)
        else:
            _log.info("%s: %d keys", self._file, len(self._known))


def load_key_file(file: Path) -> KeyFile:
    """Return a file's entries. Raises BadRequestError naming the field, and never showing what stands there."""
    try:
        stated = yaml.safe_load(file.read_text("utf-8"))
    except OSError as error:
        raise BadRequestError(f"cannot read {file}: {error.strerror}", "api_keys") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadRequestError(f"{file} is neither YAML nor JSON", "api_keys") from error
    try:
        return KeyFile.model_validate(stated)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        said = str(first["msg"]).removeprefix("Value error, ")
        raise BadRequestError(f"{file}: {where}{': ' if where else ''}{said}", "api_keys") from None


def load_admin_key(file: str | None, environment: Mapping[str, str]) -> str | None:
    """Return the admin key of a file, or else of `SPECSERVE_ADMIN_KEY`; None when there is neither.

    Raises: BadRequestError when it cannot be read or is too short to be a secret.
    """
    key = environment.get(ADMIN_KEY_VARIABLE) or None
    if file is not None:
        try:
            key = Path(file).read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise BadRequestError(f"cannot read the admin key in {file}", "admin_key_file") from error
    if key is not None and len(key) < MIN_ADMIN_KEY_CHARS:
        raise BadRequestError(f"the admin key has less than {MIN_ADMIN_KEY_CHARS} characters", "admin_key_file")
    return key


def new_key() -> str:
    """Return a fresh key of 256 random bits."""
    return f"sk-{secrets.token_urlsafe(32)}"


def key_hash(key: str) -> str:
    """Return what a key's entry holds of it."""
    return _digest(key).hex()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _stamp(file: Path) -> tuple[int, int, int] | None:
    """Return what changes with the file's content; None when it is not there."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _principals(file: KeyFile) -> tuple[tuple[bytes, Principal], ...]:
    return tuple((bytes.fromhex(each), _principal(entry)) for entry in file.keys for each in entry.sha256)


def _principal(entry: KeyEntry) -> Principal:
    return Principal(
        key_id=entry.id,
        roles=_ROLES[entry.role],
        tiers=entry.tiers,
        default_tier=entry.default_tier or entry.tiers[0],
        limits=entry.limits,
        priority_limits=entry.priority_limits,
        min_priority=entry.min_priority,
        tenant=entry.tenant or entry.id,
    )
