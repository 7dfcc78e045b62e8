"""Percentiles, and results as a table and as JSON. Pure except for `write`."""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

Figures = Mapping[str, float | int | str]
PERCENTILES = (50, 90, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the values lie, interpolated linearly; NaN without values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles of durations, in milliseconds: `mean_<name>_ms`, `p50_<name>_ms` and so on.

    Returns nothing if there are no durations, such as gaps between pieces of text if every text came in one piece.
    """
    if not seconds:
        return {}
    figures = {f"mean_{name}_ms": 1e3 * statistics.fmean(seconds)}
    return figures | {f"p{percent}_{name}_ms": 1e3 * percentile(seconds, percent) for percent in PERCENTILES}


def table(title: str, figures: Figures) -> Iterator[str]:
    """Yields the lines of a table."""
    width = max(map(len, figures))
    yield f"\n{title}"
    for name, value in figures.items():
        yield f"  {name:<{width}}  {value:>12.3f}" if isinstance(value, float) else f"  {name:<{width}}  {value:>12}"


def write(figures: Figures, path: Path) -> None:
    """Writes the figures to a file, as JSON."""
    path.write_text(json.dumps(dict(figures), indent=1) + "\n", encoding="utf-8")
