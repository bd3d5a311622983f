"""From the passes of one workload at one concurrency to its cells."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .errors import LoadError
from .figures import Figures, Pass, Ratios, figures, medians, num_differing, ratios
from .rival import PREFIX


@dataclass(frozen=True, slots=True)
class Cell:
    """The medians of one workload in one mode.

    `differing` counts the requests of a pass whose greedy text is, in any repeat, not that of plain decoding's first
    repeat; plain itself is held to it too. None when not greedy, or when plain was not run.
    """

    workload: str
    concurrency: int
    mode: str
    figures: Figures
    ratios: Ratios
    num_requests: int
    differing: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the cell as the `--json` report holds it; GPU memory is not visible here, hence null."""
        return {
            "workload": self.workload,
            "concurrency": self.concurrency,
            "mode": self.mode,
            **asdict(self.figures),
            "gpu_mb": None,
            "ratio_to_plain": self.ratios.to_plain,
            "ratio_to_best_fixed": self.ratios.to_best_fixed,
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
    """Return a cell for each mode and one for each of transformers' settings among `passes`, in their order."""
    ours = {name: found for name, found in passes.items() if not name.startswith(PREFIX)}
    theirs = {name.removeprefix(PREFIX): found for name, found in passes.items() if name.startswith(PREFIX)}
    by_mode = {mode: medians([figures(one) for one in found]) for mode, found in ours.items()}
    by_setting = {setting: medians([figures(one) for one in found]) for setting, found in theirs.items()}
    found_ratios = ratios(
        {mode: one.tokens_per_s for mode, one in by_mode.items()},
        {setting: one.tokens_per_s for setting, one in by_setting.items()},
    )
    reference = ours["plain"][0] if greedy and "plain" in ours else None
    cells = [
        Cell(
            workload,
            concurrency,
            mode,
            by_mode[mode],
            found_ratios[mode],
            len(found[0].samples),
            None if reference is None else num_differing(found, reference),
        )
        for mode, found in ours.items()
    ]
    return cells, [
        RivalCell(workload, concurrency, setting, one.tokens_per_s, one.others_cpu_share)
        for setting, one in by_setting.items()
    ]


def check_same_prompts(passes: Mapping[str, Sequence[Pass]]) -> None:
    """Raise LoadError when server and transformers did not read the same number of tokens in every prompt."""
    lengths = {name: [sample.num_prompt_tokens for sample in found[0].samples] for name, found in passes.items()}
    if len({tuple(found) for found in lengths.values()}) > 1:
        first, *others = lengths
        other = next(name for name in others if lengths[name] != lengths[first])
        raise LoadError(
            f"{first} read prompts of {lengths[first]} tokens, {other} of {lengths[other]}: they cannot be compared."
        )
