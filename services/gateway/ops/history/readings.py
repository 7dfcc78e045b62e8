"""Which numbers a point of the history has, and how they follow from heartbeats and from a gateway's metrics. Pure."""

from collections.abc import Iterable, Sequence

from antiphon.services.gateway.edge.metrics import FIRST_TOKEN_BOUNDS_S, TOKEN_BOUNDS_S
from antiphon.services.gateway.ops.history.differences import Distribution, Rates, Seen
from antiphon.shared.messages import EngineStatus, GatewayStatus, Heartbeat, HistogramCounts

SERIES = (
    "ttft_mean_s",
    "ttft_p95_s",
    "itl_mean_s",
    "itl_p95_s",
    "generated_tokens_per_s",
    "prompt_tokens_per_s",
    "requests_per_s",
    "errors_per_s",
    "running",
    "waiting",
    "kv_cache_share",
    "preemptions_per_s",
)
_ENGINE_RATES = {
    "generated_tokens_per_s": "generation_tokens",
    "prompt_tokens_per_s": "prompt_tokens",
    "steps_per_s": "step",
    "preemptions_per_s": "preemptions",
    "swapped_out_per_s": "swapped_out_blocks",
    "swapped_in_per_s": "swapped_in_blocks",
}
"""By name of a rate: the field of `EngineCounters`."""
_GATEWAY_RATES = {"requests_per_s": "accepted_requests", "errors_per_s": "errors"}
_QUERIES, _HITS = "prefix_cache_queries", "prefix_cache_hits"
ENGINE_SERIES = ("running", "waiting", "used_blocks", "free_blocks", *_ENGINE_RATES, "prefix_hit_share")
Member = tuple[Heartbeat, float]
"""A heartbeat, and the seconds since it arrived."""


class Readings:
    """Makes the numbers of one point after the other."""

    def __init__(self) -> None:
        self._first_tokens, self._gaps = Distribution(FIRST_TOKEN_BOUNDS_S), Distribution(TOKEN_BOUNDS_S)
        self._engine_rates, self._gateway_rates = Rates(), Rates()

    def latencies(self, first_tokens: HistogramCounts, gaps: HistogramCounts) -> dict[str, float | None]:
        """Returns the latencies since the last call. Arguments: all counts so far."""
        self._first_tokens.add(first_tokens)
        self._gaps.add(gaps)
        return {
            "ttft_mean_s": self._first_tokens.mean(),
            "ttft_p95_s": self._first_tokens.quantile(0.95),
            "itl_mean_s": self._gaps.mean(),
            "itl_p95_s": self._gaps.quantile(0.95),
        }

    def engines(self, members: Sequence[Member], now_s: float) -> dict[str, dict[str, float]]:
        """Returns the numbers of each engine by its id; those that are not known are missing."""
        found = [(beat, age, beat.status) for beat, age in members if isinstance(beat.status, EngineStatus)]
        fields = (*_ENGINE_RATES.values(), _QUERIES, _HITS)
        rates = self._engine_rates.of(
            {
                beat.id: Seen(beat.instance_id, now_s - age, {name: getattr(status.counters, name) for name in fields})
                for beat, age, status in found
            }
        )
        return {beat.id: _engine(status, rates.get(beat.id, {})) for beat, _, status in found}

    def gateways(self, members: Sequence[Member], now_s: float) -> dict[str, float | None]:
        """Returns the numbers of all gateways together."""
        found = [(beat, age, beat.status) for beat, age in members if isinstance(beat.status, GatewayStatus)]
        rates = self._gateway_rates.of(
            {
                beat.id: Seen(
                    beat.instance_id, now_s - age, {name: getattr(status, name) for name in _GATEWAY_RATES.values()}
                )
                for beat, age, status in found
            }
        )
        totals = {name: _total(one.get(field) for one in rates.values()) for name, field in _GATEWAY_RATES.items()}
        return {**totals, "waiting": sum(status.num_waiting for _, _, status in found)}


def whole(engines: dict[str, dict[str, float]], gateways: dict[str, float | None]) -> dict[str, float | None]:
    """Returns the numbers of the whole server, those of `gateways` included."""
    names = ("generated_tokens_per_s", "prompt_tokens_per_s", "preemptions_per_s", "running")
    totals = {name: _total(one.get(name) for one in engines.values()) for name in names}
    waiting = (gateways.get("waiting") or 0.0) + sum(one["waiting"] for one in engines.values())
    used, free = (sum(one[name] for one in engines.values()) for name in ("used_blocks", "free_blocks"))
    share = used / (used + free) if used + free else None
    return {**gateways, **totals, "waiting": waiting, "kv_cache_share": share}


def _engine(status: EngineStatus, rates: dict[str, float]) -> dict[str, float]:
    load = status.load
    numbers: dict[str, float] = {
        "running": load.num_running,
        "waiting": load.num_waiting,
        "used_blocks": status.num_blocks - load.num_free_blocks,
        "free_blocks": load.num_free_blocks,
    }
    numbers |= {name: rates[field] for name, field in _ENGINE_RATES.items() if field in rates}
    if rates.get(_QUERIES):
        numbers["prefix_hit_share"] = rates[_HITS] / rates[_QUERIES]
    return numbers


def _total(values: Iterable[float | None]) -> float | None:
    """Returns the sum of the known values; None if there is none."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
