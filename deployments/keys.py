"""`specserve keys`: make a key, or look at a file of them."""

import argparse

import yaml
from pydantic import ValidationError

from specserve.service.errors import BadRequestError

from .credentials import KeyEntry, key_hash, load_key_file, new_key

TIERS = ("priority", "default", "flex")


def run(args: argparse.Namespace) -> int:
    """Do what `args` say and return the exit code."""
    print(_listed(args) if args.action == "show" else _made(args), end="")
    return 0


def _made(args: argparse.Namespace) -> str:
    """Return a fresh key and the entry that holds its hash."""
    key = new_key()
    entry = {
        "id": args.id,
        "sha256": [key_hash(key)],
        "role": args.role,
        "tiers": list(TIERS[TIERS.index(args.tier) :]),
    }
    limits = {name: getattr(args, name) for name in ("requests_per_minute", "tokens_per_minute", "max_concurrent")}
    stated = {name: number for name, number in limits.items() if number is not None}
    if stated:
        entry["limits"] = stated
    try:
        KeyEntry.model_validate(entry)
    except ValidationError as error:
        raise BadRequestError(f"--id {args.id}: letters, digits and . _ @ - only, at most 64", "id") from error
    lines = yaml.safe_dump([entry], sort_keys=False)
    return f"# the key, shown this once:\n{key}\n\n# its entry for the file of --api-keys, under `keys:`\n{lines}"


def _listed(args: argparse.Namespace) -> str:
    """Return a line for each entry of a file."""
    entries = load_key_file(args.file).keys
    rows: list[tuple[str, ...]] = [("id", "role", "keys", "tiers", "requests/min", "tokens/min", "at a time")]
    for entry in entries:
        limits = entry.limits
        numbers = (limits.requests_per_minute, limits.tokens_per_minute, limits.max_concurrent)
        shown = tuple("-" if number is None else str(number) for number in numbers)
        rows.append((entry.id, entry.role, str(len(entry.sha256)), ",".join(entry.tiers), *shown))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "".join(f"{line}\n" for line in lines)
