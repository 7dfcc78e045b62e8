"""Computes medians, ratios and tables from samples. Without side effects. Called by `peers` and `bench.run`.

A ratio is computed within each round, in which both sides ran within the same minutes; the result is the median over
the rounds.
"""

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from bench.harness.sample import Sample, spread

Value = Callable[[Sample], float]


def median(samples: Sequence[Sample], value: Value) -> float:
    """Returns the median of `value` over the samples."""
    return statistics.median(value(sample) for sample in samples)


def pick(samples: Sequence[Sample], load: str, server: str) -> list[Sample]:
    """Returns the samples of one server under one load."""
    return [sample for sample in samples if (sample.load, sample.server) == (load, server)]


def ratio(
    samples: Sequence[Sample], load: str, server: str, other: str, value: Value = lambda sample: sample.output_rate
) -> float | None:
    """Returns the median over the rounds of `server`'s value divided by `other`'s; None if no round has both.

    The value is the rate of output tokens by default.
    """
    theirs = {sample.round: sample for sample in pick(samples, load, other)}
    pairs = [(mine, theirs[mine.round]) for mine in pick(samples, load, server) if mine.round in theirs]
    return statistics.median(value(a) / value(b) for a, b in pairs) if pairs else None


def summary(samples: Sequence[Sample], ours: str) -> list[dict[str, Any]]:
    """Returns one record for each load and server that has samples, in the order of the first samples."""
    loads, servers = (list(dict.fromkeys(names)) for names in zip(*((s.load, s.server) for s in samples), strict=True))
    pairs = itertools.product(loads, servers)
    return [_record(samples, load, server, ours) for load, server in pairs if pick(samples, load, server)]


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns a Markdown table with aligned columns."""
    cells = [[str(cell) for cell in row] for row in (heads, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def number(value: float | None, digits: int = 0) -> str:
    """Returns a number as text, or a dash for None."""
    return "–" if value is None else f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    """Returns a share as a percentage, or a dash for None."""
    return "–" if value is None else f"{value:.0%}"


FLOOR_HEAD = "of floor: own moments / best read / sum"


def floor_shares(record: dict[str, Any]) -> str:
    """Returns the three shares of the floor of a record of `summary`, as percentages."""
    return " / ".join(percent(record[f"share_of_{name}"]) for name in ("own_floor", "floor", "sum_floor"))


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "load": lambda r: r["load"],
    "server": lambda r: r["server"],
    "out tok/s": lambda r: number(r["output_tok_per_s"], 1),
    "spread": lambda r: percent(r["spread"]),
    "ours ÷ it": lambda r: number(r["ours_over_it"], 2),
    "moments alike": lambda r: number(r["ours_over_it_in_moments"], 2),
    "all tok/s": lambda r: number(r["total_tok_per_s"]),
    FLOOR_HEAD: floor_shares,
    "TTFT p50 / p99 ms": lambda r: f"{number(r['ttft_ms_p50'])} / {number(r['ttft_ms_p99'])}",
    "ITL p50 / p99 ms": lambda r: f"{number(r['itl_ms_p50'], 1)} / {number(r['itl_ms_p99'], 1)}",
    "TPOT ms": lambda r: number(r["tpot_ms_p50"], 1),
    "cores": lambda r: number(r["server_cores"], 2),
    "client": lambda r: number(r["client_cores"], 2),
    "foreign": lambda r: number(r["foreign_cores"], 2) + ("*" if r["noisy"] else ""),
}
"""Columns of the table of loads.

*foreign*: `*` marks a load with at least one sample in which other programs used the processor in every try. *moments
alike* is *ours ÷ it* for the share of the floor in place of the rate. Each server's floor is that of the limits
measured in pauses of its own load, so the ratio does not depend on whether the machine's speed differed between the two
loads."""


def loads_table(records: Sequence[dict[str, Any]]) -> str:
    """Returns the records of `summary` as a Markdown table."""
    return table(list(COLUMNS), [[cell(record) for cell in COLUMNS.values()] for record in records])


def limits_table(turns: Sequence[dict[str, Any]]) -> str:
    """Returns a table of the machine's limits: median, smallest and largest over all rounds.

    `turns` has records of `measure.Turn`.
    """
    names = {"read_model_gb_s": "read, model's size, GB/s", "read_large_gb_s": "read, large buffer, GB/s"}
    names["read_sum_gb_s"] = "read, plain sum, GB/s"
    names["gemm_gflop_s"] = "GEMM, GFLOP/s"
    rows: list[list[str]] = []
    for key, title in names.items():
        values = [turn[key] for turn in turns]
        rows.append([title, *(number(value, 1) for value in (statistics.median(values), min(values), max(values)))])
    return table(["limit", "median", "least", "most"], rows)


def _record(samples: Sequence[Sample], load: str, server: str, ours: str) -> dict[str, Any]:
    chosen = pick(samples, load, server)
    fields = ("ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99", "tpot_ms_p50", "wall_s", "floor_s")
    return {
        "load": load,
        "server": server,
        "rounds": len(chosen),
        "noisy": sum(sample.cpu.noisy for sample in chosen),
        "output_tok_per_s": median(chosen, lambda s: s.output_rate),
        "total_tok_per_s": median(chosen, lambda s: s.total_rate),
        "spread": spread([sample.output_rate for sample in chosen]),
        "ours_over_it": None if server == ours else ratio(samples, load, ours, server),
        "ours_over_it_in_moments": None if server == ours else ratio(samples, load, ours, server, _own_share),
        "share_of_floor": median(chosen, lambda s: s.share),
        "share_of_sum_floor": median(chosen, lambda s: s.sum_share),
        "share_of_own_floor": median(chosen, lambda s: s.own_share),
        **{name: median(chosen, lambda s, name=name: getattr(s, name)) for name in fields},
        "server_cores": median(chosen, lambda s: sum(s.cpu.parts.values())),
        "client_cores": median(chosen, lambda s: s.cpu.client),
        "foreign_cores": median(chosen, lambda s: s.cpu.foreign),
        "part_cores": {
            part: median(chosen, lambda s, part=part: s.cpu.parts.get(part, 0.0)) for part in _parts(chosen)
        },
    }


def _own_share(sample: Sample) -> float:
    return sample.own_share


def _parts(samples: Sequence[Sample]) -> list[str]:
    return sorted({part for sample in samples for part in sample.cpu.parts})
