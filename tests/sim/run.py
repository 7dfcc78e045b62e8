"""Runs the swarm from the command line: `python -m tests.sim.run -n 10000`, or `--seed N` to replay one run.

Prints progress and, for the first seed that fails, what was violated, the command that replays it and the faults around
it. Exit code 1 when a seed has failed.
"""

import argparse
import collections
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.sim.plan import NUM_MODELS, draw_plan
from tests.sim.shrink import shrink
from tests.sim.society import make_tokenizer
from tests.sim.swarm import Result, run_plan

PROGRESS_S = 5.0
SEEDS_A_JOB = 8
EVENTS_SHOWN = 60


def main(argv: list[str] | None = None) -> int:
    """The command."""
    options = _options(argv)
    with tempfile.TemporaryDirectory() as directory:
        directories = make_models(Path(directory))
        if options.seed is not None:
            return _replay(options, directories)
        return _many(options, directories)


def make_models(directory: Path) -> tuple[str, ...]:
    """A directory with a tokenizer for each model."""
    paths = [directory / f"m{index}" for index in range(NUM_MODELS)]
    for path in paths:
        path.mkdir()
        make_tokenizer(path)
    return tuple(map(str, paths))


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.run", description=__doc__)
    parser.add_argument("-n", type=int, default=1000, help="how many seeds (default: 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a processor)")
    parser.add_argument("--keep-going", action="store_true", help="run the other seeds after one has failed")
    parser.add_argument("--seed", type=int, help="replay this seed alone")
    parser.add_argument(
        "--shrink", action="store_true", help="with --seed: leave out faults and requests while it fails"
    )
    parser.add_argument("--messages", action="store_true", help="with --seed: the messages before the violation")
    return parser.parse_args(argv)


def _replay(options: argparse.Namespace, directories: tuple[str, ...]) -> int:
    plan = draw_plan(options.seed)
    if options.shrink:
        plan = shrink(plan, lambda smaller: bool(run_plan(smaller, directories).violations))
    result = run_plan(plan, directories, options.messages)
    print(plan)
    print(result.report())
    again = run_plan(plan, directories)
    print(f"fingerprint {result.fingerprint}")
    if again.fingerprint != result.fingerprint or again.events != result.events:
        print("NOT DETERMINISTIC: a second run of the same plan differs")
        return 1
    return 1 if result.violations else 0


def _many(options: argparse.Namespace, directories: tuple[str, ...]) -> int:
    failed: list[int] = []
    count = 0
    outcomes: collections.Counter[str] = collections.Counter()
    began = shown = time.monotonic()
    seeds = range(options.first, options.first + options.n)
    for count, result in enumerate(run_seeds(seeds, options.jobs, directories), start=1):
        outcomes.update(result.outcomes)
        if result.violations:
            failed.append(result.seed)
            _show_failure(result, first=len(failed) == 1)
            if not options.keep_going:
                break
        if time.monotonic() - shown > PROGRESS_S:
            shown = time.monotonic()
            print(
                f"{count} of {options.n} seeds, {len(failed)} failed, {count / (shown - began):.1f} a second",
                flush=True,
            )
    ends = ", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items()))
    print(f"{count} seeds, {len(failed)} failed; requests: {ends}")
    return 1 if failed else 0


def run_seeds(seeds: range, jobs: int, directories: tuple[str, ...]) -> Iterator[Result]:
    """The results in the order of the seeds, from `jobs` processes."""
    if jobs == 1:
        yield from (_run_seed(seed, directories) for seed in seeds)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        try:
            yield from pool.map(_run_seed, seeds, [directories] * len(seeds), chunksize=SEEDS_A_JOB)
        finally:
            pool.shutdown(cancel_futures=True)


def _run_seed(seed: int, directories: tuple[str, ...]) -> Result:
    return run_plan(draw_plan(seed), directories)


def _show_failure(result: Result, first: bool) -> None:
    print(f"seed {result.seed} failed; replay it with: make sim ARGS='--seed {result.seed}' (--shrink, --messages)")
    if not first:
        print(f"  {result.violations[0]}")
        return
    print(draw_plan(result.seed))
    shown = Result(result.seed, result.violations, result.events[-EVENTS_SHOWN:])
    print(shown.report(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
