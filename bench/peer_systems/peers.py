"""Compares this system with other serving systems on one machine: `make bench-peers ARGS="--model DIR --vllm …"`.

Every server is started once with the same model, and is stopped (SIGSTOP) while another server is measured. Each round
runs each load on each server; the order of the servers rotates from round to round. The machine's limits are measured
before and after each load and in short pauses of it (`bench.limits_of_machine.moments`). Servers are compared by ratios
within a round. A server that is not named on the command line is left out, and the results say so.

With `--quantized` the servers are this system with weights of 16, 8 and 4 bits, llama.cpp with Q8_0 and Q4_0, which
`llama-quantize` makes from the GGUF file, and OpenVINO with int8 and int4.
"""

import argparse
import contextlib
import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench.harness import loads, measure, report
from bench.harness.output import save
from bench.harness.sample import Sample, rounded
from bench.harness.serving import ROOT, Server, Serving, end_in_order
from bench.limits_of_machine import cpu_accounting, machine, roofline
from bench.limits_of_machine.moments import Moments
from bench.peer_systems import quantized
from bench.peer_systems.peer_servers import (
    LlamaServer,
    OpenVino,
    Vllm,
    llama_version,
    openvino_model,
    openvino_version,
    vllm_version,
)

OURS = "antiphon"


@dataclass
class Results:
    """The results of a run so far."""

    head: dict[str, Any]
    turns: list[measure.Turn] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """Returns the results as a record for a results file."""
        return {
            **self.head,
            "summary": [rounded(record) for record in report.summary(self.samples, OURS)],
            "failures": self.failures,
            "limits": [turn.record() for turn in self.turns],
            "samples": [sample.record() for sample in self.samples],
        }

    def text(self) -> str:
        """Returns the results as text: tables and failures."""
        if self.head["quantized"]:
            return "\n\n".join([quantized.table(self.samples), *(f"failed: {failure}" for failure in self.failures)])
        tables = [report.loads_table(report.summary(self.samples, OURS))]
        tables.append(report.limits_table([turn.record() for turn in self.turns]))
        return "\n\n".join([*tables, *(f"failed: {failure}" for failure in self.failures)])


def main() -> int:
    options = parse()
    end_in_order()
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(server) for server in started(options)]
        results = Results(head(options, servers))
        moments = stack.enter_context(Moments(results.head["model"]["read_bytes"], machine.cores()))
        print(json.dumps(results.head, indent=1), flush=True)
        for _ in rounds(options, servers, moments, results):
            options.results.parent.mkdir(parents=True, exist_ok=True)
            save(results.record(), options.results)
    print(results.text())
    print(f"\nwritten to {options.results}")
    return 1 if results.failures else 0


def parse() -> argparse.Namespace:
    """Parses the command-line options and fills in the default paths."""
    parser = argparse.ArgumentParser(description="This system beside others, in turn, on one machine.")
    parser.add_argument("--model", type=Path, required=True, help="model directory")
    parser.add_argument("--vllm", type=Path, help="the command `vllm` of an environment with vLLM's CPU build")
    parser.add_argument("--vllm-dtype", default="bfloat16", help="float32 is vLLM's better one without AVX512-BF16")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server")
    parser.add_argument("--gguf", type=Path, help="the same model for llama.cpp (default: MODEL-bf16.gguf beside it)")
    parser.add_argument("--openvino", type=Path, help="Python of an environment with openvino-genai and optimum-intel")
    parser.add_argument("--quantized", action="store_true", help="weights of 8 and 4 bits beside those of the others")
    parser.add_argument("--servers", nargs="*", help="only those with these names (default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    names = [load.name for load in loads.LOADS]
    parser.add_argument("--loads", nargs="*", default=names, choices=names)
    parser.add_argument("--short", action="store_true", help="a rehearsal: one wave of each load, one try")
    parser.add_argument("--threads", type=int, default=0, help="of our engine (default: as it decides)")
    parser.add_argument("--results", type=Path, help="default: bench/results/peers-MODEL.json")
    options = parser.parse_args()
    if options.quantized and (options.vllm or not (options.llama_server or options.openvino)):
        parser.error("--quantized compares with llama.cpp and OpenVINO: give --llama-server or --openvino, no --vllm")
    options.model = options.model.resolve()
    options.gguf = options.gguf or options.model.with_name(options.model.name + "-bf16.gguf")
    kind = "quantized-peers" if options.quantized else "peers"
    unknown = set(options.servers or ()) - set(starts(options))
    if unknown:
        parser.error(f"no such servers: {', '.join(sorted(unknown))}; there are {', '.join(starts(options))}")
    options.results = options.results or ROOT / "bench" / "results" / f"{kind}-{options.model.name}.json"
    return options


def starts(options: argparse.Namespace) -> dict[str, quantized.Start]:
    """Returns what starts each server, by its name."""
    model, found = options.model, dict[str, quantized.Start]()
    found[OURS] = partial(Serving, f"--model={model}", f"--threads={options.threads}")
    if options.quantized:
        found |= quantized.ours(model, options.threads)
    if options.vllm:
        found["vllm"] = partial(Vllm, options.vllm, model, options.vllm_dtype)
    if options.llama_server:
        found |= (
            quantized.of_llama(options.llama_server, model, options.gguf)
            if options.quantized
            else {"llama.cpp": partial(LlamaServer, options.llama_server, options.gguf)}
        )
    if options.openvino:
        found |= (
            quantized.of_openvino(options.openvino, model)
            if options.quantized
            else {"OpenVINO": lambda: OpenVino(options.openvino, openvino_model(options.openvino, model, "fp16"))}
        )
    return found


def started(options: argparse.Namespace) -> Iterator[Server]:
    """Starts the servers one after the other and yields each; a server is paused as soon as it is ready."""
    for name, start in starts(options).items():
        if not options.servers or name in options.servers:
            yield _paused(start())


def head(options: argparse.Namespace, servers: list[Server]) -> dict[str, Any]:
    """Returns the head of the results: machine, model, versions, start times and memory of the servers."""
    versions = {OURS: machine.version("antiphon")}
    if options.vllm:
        versions["vllm"] = f"{vllm_version(options.vllm)}, {options.vllm_dtype}"
    if options.llama_server:
        versions["llama.cpp"] = llama_version(options.llama_server)
    if options.openvino:
        versions["OpenVINO"] = openvino_version(options.openvino)
    decoder = measure.describe(options.model)
    return {
        "machine": machine.facts(),
        "model": {"name": options.model.name, "dtype": decoder.dtype, "read_bytes": roofline.weight_bytes(decoder)},
        "versions": versions,
        "left_out": [name for name in ("vllm", "llama.cpp", "OpenVINO") if name not in versions],
        "rehearsal": options.short,
        "quantized": options.quantized,
        "start_s": {server.name: round(server.ready_s, 1) for server in servers},
        "memory_mib": {server.name: round(server.memory_mb().total()) for server in servers},
    }


def rounds(options: argparse.Namespace, servers: list[Server], moments: Moments, results: Results) -> Iterator[None]:
    """Runs the measurements. Yields after each load has run on all servers, so that the caller can save the results."""
    prompts, decoder = loads.Prompts(options.model), measure.describe(options.model)
    seeds = itertools.count(time.time_ns() // 10**9 * 1000)
    retry_policy = cpu_accounting.HURRY if options.short else cpu_accounting.RetryPolicy()
    wanted = itertools.product(range(options.rounds), loads.chosen(options.loads, options.short))

    def measured(turn: measure.Turn) -> list[Sample]:
        first = turn.round % len(servers)
        found = [measured_one(server, turn) for server in servers[first:] + servers[:first]]
        return [sample for sample in found if sample]

    def measured_one(server: Server, turn: measure.Turn) -> Sample | None:
        server.resume()
        try:
            sample = measure.sample(server, turn, prompts, seeds, moments)
            print(progress(sample), file=sys.stderr, flush=True)
            return sample
        except measure.LoadFailed as error:
            results.failures.append(f"round {turn.round}, {server.name}: {error}")
            print(results.failures[-1], file=sys.stderr, flush=True)
            return None
        finally:
            server.pause()

    for turn, samples in measure.turns(wanted, decoder, retry_policy, machine.cores(), measured):
        results.turns.append(turn)
        results.samples += samples
        yield


def progress(sample: Sample) -> str:
    """Returns a progress line for one sample."""
    where = f"round {sample.round} {sample.load:<7} {sample.server:<10}"
    rates = f"{sample.output_rate:8.1f} tok/s  TTFT {sample.ttft_ms_p50:7.0f} ms"
    return f"{where} {rates}  {sample.wall_s:6.1f} s  foreign {sample.cpu.foreign:5.2f}"


def _paused(server: Server) -> Server:
    server.pause()
    return server


if __name__ == "__main__":
    sys.exit(main())
