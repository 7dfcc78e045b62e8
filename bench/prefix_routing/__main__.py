"""What following the prefix caches of engines saves, in a simulation: four engines, two gateways, shared prefixes.

    python -m bench.prefix_routing [--seconds 120] [--seed 1] [--json FILE]

Of 50 prefixes with 2,000 tokens, chosen by Zipf's law, each prompt has one, and 200 tokens of its own. Compared are the
router that follows caches, the router that guesses from what its own gateway has sent, and one that knows all caches
and queues at once. Printed are the share of the prompt tokens that was cached, the balance (largest divided by mean) of
the sequences and of the computed tokens of the engines, and the time to the first token.

    python -m bench.prefix_routing --index

measures what a gateway needs for each block that it knows, and to look up a prompt of 2,000 tokens.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.harness.output import print_and_save
from bench.prefix_routing.index import measure
from bench.prefix_routing.policies import Following, Guessing, Knowing
from bench.prefix_routing.simulation import Outcome, Simulation, Workload, imbalance

BETTER, NEAR = 1.3, 0.95
"""Goals: cached tokens in relation to the router that guesses, and to the one that knows everything."""
VARIANTS: dict[str, dict[str, Any]] = {
    "32 prompts/s": {},
    "24 prompts/s": {"rate_s": 24.0},
    "16 prompts/s": {"rate_s": 16.0},
    "flat (0.7)": {"exponent": 0.7},
    "steep (1.3)": {"exponent": 1.3},
    "small caches": {"blocks_an_engine": 2000},
    "large caches": {"blocks_an_engine": 3600},
    "one gateway": {"one_gateway": True},
    "late gateway": {"late_s": 60.0},
}
POLICIES = {"guesses": Guessing, "follows": Following, "knows all": Knowing}


def main() -> None:
    """Runs the simulations and prints their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="simulated time; the second half counts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--index", action="store_true", help="measure the gateway's index instead")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    found = measure() if args.index else _simulate(args.seconds, args.seed)
    print_and_save(found, args.json)


def _simulate(seconds: float, seed: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for variant, changes in VARIANTS.items():
        load = replace(Workload(duration_s=seconds, seed=seed), **changes)
        if load.late_s:
            load = replace(load, late_s=seconds / 2)
        row = dict(_rows(load))
        cached = {name: figures["cached"] for name, figures in row.items()}
        row["follows"]["to guesses"] = round(cached["follows"] / cached["guesses"], 3)
        row["follows"]["to knows all"] = round(cached["follows"] / cached["knows all"], 3)
        found[variant] = row
    found["goals"] = {"to guesses": BETTER, "to knows all": NEAR}
    return found


def _rows(load: Workload) -> Iterator[tuple[str, dict[str, float]]]:
    for name, policy in POLICIES.items():
        # Who knows everything has no need of two gateways.
        own = replace(load, one_gateway=True, late_s=0.0) if policy is Knowing else load
        yield name, _figures(Simulation(own, policy).run())


def _figures(outcome: Outcome) -> dict[str, float]:
    times = sorted(outcome.ttft_s)
    figures = {
        "cached": round(outcome.cached_tokens / outcome.prompt_tokens, 3),
        "sequences max/mean": round(imbalance(outcome.sequences), 3),
        "computed max/mean": round(imbalance(outcome.computed), 3),
        "computed by the busiest": max(outcome.computed.values()),
        "p50 ms": round(times[len(times) // 2] * 1e3),
        "p99 ms": round(times[len(times) * 99 // 100] * 1e3),
    }
    if outcome.late_tokens:
        figures["cached at the late gateway's start"] = round(outcome.late_cached / outcome.late_tokens, 3)
    return figures


if __name__ == "__main__":
    main()
