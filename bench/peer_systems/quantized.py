"""Servers with weights of 8 and 4 bits: this system's and llama.cpp's, and the table that compares them.

Each system quantizes a plain model in the way that one command of its own offers. Here these are `--quantization ifq`
(8 bits, a scale for each output), `ifq_w8a8` (the same, and each row of a product in 8 bits), `ifq_nf4` (4 bits, a
scale for 64 weights) and `ifq_w4a8` (the same, and each row of a product in 8 bits), there `llama-quantize` to Q8_0 and
Q4_0 (a scale for 32 weights). llama.cpp rounds the rows of products to 8 bits with both. Both systems quantize the
output head, this system to 8 bits; llama.cpp also quantizes the embedding. Called by `peers`.
"""

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.harness import report
from bench.harness.sample import Sample
from bench.harness.serving import Server, Serving
from bench.peer_systems.make_gguf import write
from bench.peer_systems.peer_servers import LlamaServer

PLAIN = "antiphon"
OURS = {"antiphon int8": "ifq", "antiphon W8A8": "ifq_w8a8", "antiphon W4A8": "ifq_w4a8", "antiphon NF4": "ifq_nf4"}
"""Names of this system's servers and their `--quantization`."""
THEIRS = {"llama.cpp Q8_0": "Q8_0", "llama.cpp Q4_0": "Q4_0"}
"""Names of llama.cpp's servers and their types of weights."""
RIVALS = {
    "antiphon int8": "llama.cpp Q8_0",
    "antiphon W8A8": "llama.cpp Q8_0",
    "antiphon W4A8": "llama.cpp Q4_0",
    "antiphon NF4": "llama.cpp Q4_0",
}


def started(model: Path, threads: int, llama_server: Path, gguf: Path) -> Iterator[Server]:
    """Starts the servers one after the other and yields each as soon as it is ready."""
    for name, mode in OURS.items():
        yield Serving(f"--model={model}", f"--threads={threads}", f"--quantization={mode}", name=name)
    for name, kind in THEIRS.items():
        yield LlamaServer(llama_server, quantized_file(llama_server, model, gguf, kind), name)


def quantized_file(llama_server: Path, model: Path, gguf: Path, kind: str) -> Path:
    """Returns the file of the model with weights of `kind`; makes it beside `gguf`, which is made too if missing.

    Raises SystemExit if `llama-quantize` does not lie beside `llama_server` or fails.
    """
    target = gguf.with_name(f"{gguf.stem.removesuffix('-bf16')}-{kind}.gguf")
    if target.exists():
        return target
    if not gguf.exists():
        write(model, gguf)
    tool = llama_server.with_name("llama-quantize")
    if not tool.exists():
        raise SystemExit(f"{tool} is missing: build it together with llama-server, or make {target} with it")
    done = subprocess.run([str(tool), str(gguf), str(target), kind], capture_output=True, text=True, check=False)
    if done.returncode:
        target.unlink(missing_ok=True)
        raise SystemExit(f"{tool} ended with code {done.returncode}: {done.stderr[-500:]}")
    return target


def table(samples: Sequence[Sample]) -> str:
    """Returns the rates as a Markdown table. Ratios are medians over the rounds."""
    rows: list[list[str]] = []
    for load in dict.fromkeys(sample.load for sample in samples):
        for server in dict.fromkeys(sample.server for sample in samples):
            chosen = report.pick(samples, load, server)
            if chosen:
                rate, first = (report.median(chosen, value) for value in (_rate, _first_token))
                rival = RIVALS.get(server)
                ratios = [report.ratio(samples, load, server, other) for other in (PLAIN, rival) if other]
                texts = [report.number(ratio, 2) for ratio in ratios] + ["–"] * (2 - len(ratios))
                rows.append([load, server, report.number(rate, 1), report.number(first), *texts])
    return report.table(["load", "server", "out tok/s", "TTFT p50 ms", "÷ antiphon", "÷ llama.cpp"], rows)


def _rate(sample: Sample) -> float:
    return sample.output_rate


def _first_token(sample: Sample) -> float:
    return sample.ttft_ms_p50
