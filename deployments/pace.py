"""How long tokens take lately, over what their tiers' objectives allow."""

from collections.abc import Callable

from specserve.service.stats import EngineStats


class Pace:
    """Reads an engine's counters now and then. `tpot_slo_ms` says what a tier's token may take, None for any time."""

    def __init__(self, stats: EngineStats, tpot_slo_ms: Callable[[str], float | None]) -> None:
        self._stats = stats
        self._tpot_slo_ms = tpot_slo_ms
        self._seen: dict[str, tuple[float, int]] = {}

    def over_objective(self) -> float:
        """Return time over objective per token since the last call, of the tier that is worst off; 0.0 without any."""
        worst = 0.0
        for tier, latencies in list(self._stats.latencies.items()):
            total_s, count = latencies.between_tokens.total, sum(latencies.between_tokens.counts)
            before_s, before = self._seen.get(tier, (0.0, 0))
            self._seen[tier] = (total_s, count)
            allowed_ms = self._tpot_slo_ms(tier)
            if allowed_ms and count > before:
                worst = max(worst, (total_s - before_s) / (count - before) * 1e3 / allowed_ms)
        return worst
