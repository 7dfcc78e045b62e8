"""Servers with weights of 8 and 4 bits: this system's and those of others, and the table that compares them.

Each system quantizes a plain model in the way that one command of its own offers. Here these are `--quantization ifq`
(8 bits, a scale for each output), `ifq_w8a8` (the same, and each row of a product in 8 bits), `ifq_nf4` (4 bits, a
scale for 64 weights) and `ifq_w4a8` (the same, and each row of a product in 8 bits). `llama-quantize` makes Q8_0 and
Q4_0 (a scale for 32 weights), and `optimum-cli` int8 and int4 for OpenVINO (a scale and a zero point for each output,
and for 128 weights). Both round the rows of products to 8 bits. All quantize the output head, with OpenVINO and this
system always to 8 bits; llama.cpp and OpenVINO also quantize the embedding. Called by `peers`.
"""

import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from bench.harness import report
from bench.harness.sample import Sample
from bench.harness.serving import Server, Serving
from bench.peer_systems.make_gguf import write
from bench.peer_systems.peer_servers import LlamaServer, OpenVino, openvino_model

PLAIN = "antiphon"
OURS = {"antiphon int8": "ifq", "antiphon W8A8": "ifq_w8a8", "antiphon W4A8": "ifq_w4a8", "antiphon NF4": "ifq_nf4"}
"""Names of this system's servers and their `--quantization`."""
LLAMA = {"llama.cpp Q8_0": "Q8_0", "llama.cpp Q4_0": "Q4_0"}
"""Names of llama.cpp's servers and their types of weights."""
OPENVINO = {"OpenVINO int8": "int8", "OpenVINO int4": "int4"}
"""Names of OpenVINO's servers and their kinds of weights."""
RIVALS = {
    "antiphon int8": ("llama.cpp Q8_0", "OpenVINO int8"),
    "antiphon W8A8": ("llama.cpp Q8_0", "OpenVINO int8"),
    "antiphon W4A8": ("llama.cpp Q4_0", "OpenVINO int4"),
    "antiphon NF4": ("llama.cpp Q4_0", "OpenVINO int4"),
}
Start = Callable[[], Server]


def ours(model: Path, threads: int) -> dict[str, Start]:
    """Returns what starts this system's servers, by their names."""

    def start(name: str, mode: str) -> Server:
        return Serving(f"--model={model}", f"--threads={threads}", f"--quantization={mode}", name=name)

    return {name: partial(start, name, mode) for name, mode in OURS.items()}


def of_llama(llama_server: Path, model: Path, gguf: Path) -> dict[str, Start]:
    """Returns what starts llama.cpp's servers, by their names. A file is made at its first start."""

    def start(name: str, kind: str) -> Server:
        return LlamaServer(llama_server, quantized_file(llama_server, model, gguf, kind), name)

    return {name: partial(start, name, kind) for name, kind in LLAMA.items()}


def of_openvino(python: Path, model: Path) -> dict[str, Start]:
    """Returns what starts OpenVINO's servers, by their names. A model is made at its first start."""

    def start(name: str, kind: str) -> Server:
        return OpenVino(python, openvino_model(python, model, kind), name)

    return {name: partial(start, name, kind) for name, kind in OPENVINO.items()}


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
                others = (PLAIN, *RIVALS.get(server, ("", "")))
                ratios = (report.number(report.ratio(samples, load, server, other), 2) for other in others)
                rows.append([load, server, report.number(rate, 1), report.number(first), *ratios])
    heads = ["load", "server", "out tok/s", "TTFT p50 ms", "÷ antiphon", "÷ llama.cpp", "÷ OpenVINO"]
    return report.table(heads, rows)


def _rate(sample: Sample) -> float:
    return sample.output_rate


def _first_token(sample: Sample) -> float:
    return sample.ttft_ms_p50
