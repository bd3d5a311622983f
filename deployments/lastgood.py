"""The last good policy beside its store: what cells go on with when the store cannot be read at a start."""

import json
import os
from dataclasses import asdict
from pathlib import Path

from .policystore import Desired
from .rollout import Canary, Guard, Override, Rollout


def last_good_file(store: Path) -> Path:
    """Return where the last good policy of a store lies."""
    return store.with_name(f"{store.name}.last-good.json")


def keep(store: Path, desired: Desired) -> None:
    """Write what is desired beside the store, whole or not at all. Raises OSError."""
    file = last_good_file(store)
    draft = file.with_name(f"{file.name}.{os.getpid()}")
    with draft.open("w") as sink:
        json.dump(asdict(desired), sink)
        sink.flush()
        os.fsync(sink.fileno())
    draft.replace(file)


def kept(store: Path) -> Desired | None:
    """Return what was desired last; None when nothing readable was kept."""
    try:
        found = json.loads(last_good_file(store).read_text())
        rollout, canary = found["rollout"], found["rollout"]["canary"]
        return Desired(
            found["revision"],
            Rollout(
                rollout["active"],
                None
                if canary is None
                else Canary(canary["version"], canary["percent"], tuple(canary["tiers"]), Guard(**canary["guard"])),
                rollout["shadow"],
            ),
            {int(version): document for version, document in found["documents"].items()},
            tuple(Override(**one) for one in found["overrides"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
