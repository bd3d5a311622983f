"""From the passes of one workload at one concurrency to its cells."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .errors import LoadError
from .figures import Figures, Pass, Ratios, figures, medians, num_differing, ratios
from .rival import PREFIX


def contestant_name(mode: str, proposer: str | None) -> str:
    """Return what a mode is called among others, when it drafts with `proposer` alone."""
    return mode if proposer is None else f"{proposer} {mode}"


@dataclass(frozen=True, slots=True)
class Cell:
    """The medians of one workload in one mode.

    `differing` counts the requests of a pass whose greedy text is, in any repeat, not that of plain decoding's first
    repeat; plain itself is held to it too. None when not greedy, or when plain was not run. `proposer` is the only one
    that was asked, where each is measured by itself.
    """

    workload: str
    concurrency: int
    mode: str
    figures: Figures
    ratios: Ratios
    num_requests: int
    differing: int | None = None
    proposer: str | None = None

    @property
    def name(self) -> str:
        """The mode, with its proposer where that was chosen."""
        return contestant_name(self.mode, self.proposer)

    def as_json(self) -> dict[str, Any]:
        """Return the cell as the `--json` report holds it; GPU memory is not visible here, hence null."""
        return {
            "workload": self.workload,
            "concurrency": self.concurrency,
            "mode": self.mode,
            "proposer": self.proposer,
            **asdict(self.figures),
            "gpu_mb": None,
            "ratio_to_plain": self.ratios.to_plain,
            "ratio_to_plain_error": self.ratios.to_plain_error,
            "ratio_to_best_fixed": self.ratios.to_best_fixed,
            "ratio_to_best_fixed_error": self.ratios.to_best_fixed_error,
            "ratio_to_transformers": self.ratios.to_transformers,
            "num_requests": self.num_requests,
            "differing": self.differing,
        }


@dataclass(frozen=True, slots=True)
class RivalCell:
    """The median throughput of one of transformers' settings."""

    workload: str
    concurrency: int
    setting: str
    tokens_per_s: float
    others_cpu_share: float | None = None


def cells_of(
    workload: str, concurrency: int, passes: Mapping[str, Sequence[Pass]], greedy: bool
) -> tuple[list[Cell], list[RivalCell]]:
    """Return a cell for each of our modes and one for each of transformers' settings in `passes`, in their order."""
    ours = {name: found for name, found in passes.items() if not name.startswith(PREFIX)}
    theirs = {name.removeprefix(PREFIX): found for name, found in passes.items() if name.startswith(PREFIX)}
    by_name = {name: medians([figures(one) for one in found]) for name, found in ours.items()}
    by_setting = {setting: medians([figures(one) for one in found]) for setting, found in theirs.items()}
    found_ratios = ratios(_speeds(ours), _speeds(theirs))
    reference = ours["plain"][0] if greedy and "plain" in ours else None
    cells = [
        Cell(
            workload,
            concurrency,
            name.rpartition(" ")[2],
            by_name[name],
            found_ratios[name],
            len(found[0].samples),
            None if reference is None else num_differing(found, reference),
            name.rpartition(" ")[0] or None,
        )
        for name, found in ours.items()
    ]
    return cells, [
        RivalCell(workload, concurrency, setting, one.tokens_per_s, one.others_cpu_share)
        for setting, one in by_setting.items()
    ]


def _speeds(passes: Mapping[str, Sequence[Pass]]) -> dict[str, list[float]]:
    return {name: [figures(one).tokens_per_s for one in found] for name, found in passes.items()}


def check_same_prompts(passes: Mapping[str, Sequence[Pass]]) -> None:
    """Raise LoadError when server and transformers did not read the same number of tokens in every prompt."""
    lengths = {name: [sample.num_prompt_tokens for sample in found[0].samples] for name, found in passes.items()}
    if len({tuple(found) for found in lengths.values()}) > 1:
        first, *others = lengths
        other = next(name for name in others if lengths[name] != lengths[first])
        raise LoadError(
            f"{first} read prompts of {lengths[first]} tokens, {other} of {lengths[other]}: they cannot be compared."
        )
