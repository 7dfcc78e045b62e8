"""`make bench`: one table for each model, with the whole system, the engine alone, and the machine's limits.

    python -m bench.run [MODEL_DIRECTORY ...] [--rounds N] [--short]

Without a directory: the demo model, and the models that `make bench-models` has made. Each round runs each load: the
machine's limits are measured, the load runs through the gateway and then, with other prompts of the same length, on the
engine alone (or in the other order), and the limits are measured again. Both runs are paused at intervals to measure
the limits in their own moments (`bench.limits_of_machine.moments`). The bus tax is the share of the engine's rate that
is lost in the whole system, within a round. For the demo model, `bench.reliability.record_cost` compares the system
with and without the record of requests; for the others, `bench.disaggregation` compares prefill and decode apart with
both on each engine. Results go to bench/results/MODEL.json; docs/contributing/performance.md shows published ones.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import cold_start, disaggregation, kv_transfer
from bench.engine import bus_tax
from bench.engine.engine_stream import EngineAlone, Work
from bench.harness import loads, measure, report
from bench.harness.output import save
from bench.harness.sample import Sample, rounded
from bench.harness.serving import ROOT, Serving, end_in_order
from bench.limits_of_machine import cpu_accounting, machine, processes, roofline
from bench.limits_of_machine.moments import Moments
from bench.reliability import isolation, record_cost

DEMO = ROOT / "antiphon" / "demo"
MODELS = ROOT / "bench" / "models"
SYSTEM, ENGINE = "antiphon", "engine alone"
HEADS = (
    "load", "out tok/s", "spread", report.FLOOR_HEAD, "engine alone", report.FLOOR_HEAD, "bus tax", "all tok/s",
    "TTFT p50 / p99 ms", "ITL p50 / p99 ms", "CPU µs a token: engine / rest / client", "foreign",
)  # fmt: skip


def main() -> int:
    """Measures all models, one after the other; prints and saves the results."""
    options = parse()
    end_in_order()
    for model in options.models:
        results = measured(model, options)
        options.results.mkdir(parents=True, exist_ok=True)
        path = options.results / f"{results['model']['name']}.json"
        save(results, path)
        print(f"\n{text(results)}\n\nwritten to {path}", flush=True)
    return 0


def parse() -> argparse.Namespace:
    """Parses the command-line options."""
    parser = argparse.ArgumentParser(description="One table of figures for each model directory.")
    parser.add_argument(
        "models", nargs="*", type=Path, help="model directories (default: the demo model and bench/models)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--short", action="store_true", help="a rehearsal: one wave of each load, one try, no pairs")
    parser.add_argument("--threads", type=int, default=0, help="of the engine (default: as it decides)")
    parser.add_argument(
        "--pairs",
        type=int,
        default=9,
        help="of bench.engine.bus_tax and bench.reliability.record_cost, which run for the demo model",
    )
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results", help="directory")
    options = parser.parse_args()
    options.models = [model.resolve() for model in options.models] or present()
    return options


def present() -> list[Path]:
    """Returns the directories of the demo model and of the benchmark models that exist."""
    return [DEMO, *sorted(config.parent for config in MODELS.glob("*/config.json"))]


def measured(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Runs all measurements of one model and returns the results as a record."""
    decoder = measure.describe(model)
    name = "antiphon-demo" if model == DEMO else model.name
    facts = {"name": name, "dtype": decoder.dtype, "read_bytes": roofline.weight_bytes(decoder)}
    results: dict[str, Any] = {"machine": machine.facts(), "model": facts, "rehearsal": options.short}
    results["cold_start"] = cold_start.measure(1 if options.short else 3, str(model))
    turns, samples = [], []
    flags = [f"--model={model}", f"--threads={options.threads}"]
    moments = Moments(facts["read_bytes"], machine.cores())
    with Serving(*flags) as serving, EngineAlone(str(model), options.threads) as engine, moments:
        for turn, pair in rounds(model, serving, engine, moments, options):
            turns.append(turn)
            samples += pair
        results["memory_mib"] = {part: round(size) for part, size in sorted(serving.memory_mb().items())}
    results["limits"] = [turn.record() for turn in turns]
    results["summary"] = [rounded(record) for record in report.summary(samples, SYSTEM)]
    names = list(dict.fromkeys(sample.load for sample in samples))
    results["bus_tax"] = {load: rounded(tax(samples, load)) for load in names}
    results["samples"] = [sample.record() for sample in samples]
    if model == DEMO and not options.short:
        pairs = record_cost.parse(["--pairs", str(options.pairs)])
        results["bus_tax_mixed_lengths"] = bus_tax.measure(pairs)
        results |= {f"cost_of_{kind}": record_cost.measure(pairs, kind) for kind in record_cost.GOALS_PERCENT}
        results["isolation"] = isolation.measure(isolation.parse([]))
        results["kv_transfer"] = kv_transfer.measure()
    if model != DEMO and not options.short:
        results["disaggregation"] = disaggregation.measure(disaggregation.parse([str(model)]))
    return results


def rounds(
    model: Path, serving: Serving, engine: EngineAlone, moments: Moments, options: argparse.Namespace
) -> Iterator[tuple[measure.Turn, list[Sample]]]:
    """Yields the samples of both sides for each load and round. The side that runs first alternates between rounds."""
    prompts, decoder = loads.Prompts(model), measure.describe(model)
    seeds = itertools.count(time.time_ns() // 10**9 * 1000)
    names = [load.name for load in loads.LOADS]
    retry_policy = cpu_accounting.HURRY if options.short else cpu_accounting.RetryPolicy()
    wanted = itertools.product(range(options.rounds), loads.chosen(names, options.short))

    def sides(turn: measure.Turn) -> list[Sample]:
        both = [
            lambda: measure.sample(serving, turn, prompts, seeds, moments),
            lambda: alone(engine, serving, turn, prompts, seeds, moments),
        ]
        return [side() for side in (both if turn.round % 2 == 0 else reversed(both))]

    for turn, samples in measure.turns(wanted, decoder, retry_policy, machine.cores(), sides):
        yield turn, samples
        print(f"round {turn.round} {turn.load.name} done", file=sys.stderr, flush=True)


def alone(
    engine: EngineAlone,
    serving: Serving,
    turn: measure.Turn,
    prompts: loads.Prompts,
    seeds: Iterator[int],
    moments: Moments,
) -> Sample:
    """Returns a sample of the engine alone under the same load, with newly drawn prompts.

    The CPU time of the idle system, which runs at the same time, is accounted for separately.
    """
    load = turn.load

    def parts() -> dict[str, float]:
        own = sum(process.cpu_s for process in processes.tree(engine.pid))
        return {"engine": own, "idle system": serving.cpu_seconds().total()}

    def warm_up() -> tuple[int, Work]:
        seed = next(seeds)
        draw = prompts.draw(load, seed)
        for part in (draw.prime, draw.warmup):
            engine.turn(work(part, load), load.clients)
        return seed, work(draw.measured, load)

    def run(drawn: tuple[int, Work]) -> tuple[int, int, float]:
        started = moments.clock()
        with moments.of(engine.pid):
            tokens = engine.turn(drawn[1], load.clients).tokens
            return drawn[0], tokens, moments.clock() - started

    (seed, done, wall_s), cpu = measure.beside(moments, turn, parts, warm_up, run)
    tokens = (load.requests * load.prompt_length, done)
    floors = turn.floors_with(moments.limits())
    return Sample(turn.round, load.name, ENGINE, seed, wall_s, *floors, *tokens, cpu)


def work(prompts: list[loads.Prompt], load: loads.Load) -> Work:
    """Returns the prompts in the form that `EngineAlone.turn` takes."""
    return [(prompt.token_ids, load.output) for prompt in prompts]


def tax(samples: list[Sample], load: str) -> float | None:
    """Returns the share of the engine's tokens/s that is lost in the whole system: median over the rounds."""
    whole = report.ratio(samples, load, SYSTEM, ENGINE)
    return None if whole is None else 1 - whole


def text(results: dict[str, Any]) -> str:
    """Returns the results as text for the terminal."""
    records = {(record["load"], record["server"]): record for record in results["summary"]}
    rows = [row(name, records[name, SYSTEM], records[name, ENGINE], lost) for name, lost in results["bus_tax"].items()]
    facts, model = results["machine"], results["model"]
    lines = [f"{model['name']}, {model['dtype']}, {model['read_bytes'] / 1e6:,.0f} MB of weights a step"]
    lines += [f"{facts['date']}, {facts['cores']} cores of {facts['cpu']}, torch {facts['torch']}", ""]
    lines += [report.table(HEADS, rows), "", report.limits_table(results["limits"]), ""]
    lines += [
        f"{name}: {listed(results[name])}"
        for name in results
        if name in ("cold_start", "memory_mib", "bus_tax_mixed_lengths") or name.startswith("cost_of_")
    ]
    if "kv_transfer" in results:
        lines += ["", kv_transfer.text(results["kv_transfer"])]
    if "disaggregation" in results:
        lines += ["", disaggregation.text(results["disaggregation"])]
    return "\n".join(lines)


def row(load: str, system: dict[str, Any], engine: dict[str, Any], lost: float) -> list[str]:
    """Returns the cells of one load's row. `lost` is the bus tax as a share."""
    rate, parts = system["output_tok_per_s"], system["part_cores"]
    used = [parts["engine"], sum(parts.values()) - parts["engine"], system["client_cores"]]
    return [
        load,
        report.number(rate, 1),
        report.percent(system["spread"]),
        report.floor_shares(system),
        report.number(engine["output_tok_per_s"], 1),
        report.floor_shares(engine),
        report.number(100 * lost, 1) + " %",
        report.number(system["total_tok_per_s"]),
        f"{report.number(system['ttft_ms_p50'])} / {report.number(system['ttft_ms_p99'])}",
        f"{report.number(system['itl_ms_p50'], 1)} / {report.number(system['itl_ms_p99'], 1)}",
        " / ".join(report.number(1e6 * cores / rate) for cores in used),
        report.number(system["foreign_cores"], 2) + ("*" if system["noisy"] or engine["noisy"] else ""),
    ]


def listed(values: dict[str, Any]) -> str:
    """Returns a few figures in one line; nested values are left out."""
    return ", ".join(f"{name} {value}" for name, value in values.items() if not isinstance(value, dict))


if __name__ == "__main__":
    sys.exit(main())
