"""How long work shows itself: a bar where someone watches, else one line for each cell."""

import sys
from typing import Any

from tqdm import tqdm

from .cells import Cell, RivalCell


class Progress:
    """Counts requests, or whatever else takes its time, on stderr."""

    def __init__(self, total: int, unit: str = "request") -> None:
        self._bar: tqdm[Any] | None = tqdm(total=total, unit=unit) if sys.stderr.isatty() else None

    def begin(self, what: str) -> None:
        """Say what is being measured now."""
        if self._bar is not None:
            self._bar.set_description(what)

    def advance(self, num_requests: int) -> None:
        """Count finished requests."""
        if self._bar is not None:
            self._bar.update(num_requests)

    def started(self, what: str) -> None:
        """Count one thing that has started, and name it."""
        self.begin(what)
        self.advance(1)
        if self._bar is None:
            print(f"started: {what}", file=sys.stderr, flush=True)

    def finished(self, cells: list[Cell], rivals: list[RivalCell]) -> None:
        """Show a workload's cells at one concurrency, unless a bar does."""
        if self._bar is not None:
            return
        for cell in cells:
            rounds, ratio = cell.figures.tokens_per_round, cell.ratios.to_plain
            print(
                f"{cell.workload} concurrency {cell.concurrency} {cell.name}: {cell.figures.tokens_per_s:.1f} tokens/s"
                + ("" if rounds is None else f", {rounds:.2f} tokens/round")
                + ("" if ratio is None else f", {ratio:.2f} x plain"),
                file=sys.stderr,
                flush=True,
            )
        for one in rivals:
            print(
                f"{one.workload} concurrency {one.concurrency} transformers {one.setting}: "
                f"{one.tokens_per_s:.1f} tokens/s",
                file=sys.stderr,
                flush=True,
            )

    def close(self) -> None:
        """Leave the terminal clean."""
        if self._bar is not None:
            self._bar.close()
