"""Decode rates of a whole model with plain and quantized weights on the C++ backend, without bus and HTTP.

    python -m bench.quantized_decode [--model DIRECTORY] [--batches 1 8 32] [--tokens 8] [--rounds 7] [--threads 0]

All forms of the weights are loaded in one process and decode in turn, so that other work of the machine affects all of
them. The output is the median of the output tokens per second, and the medians of the speed relative to plain weights
in the same round, by wall time and by processor time, which other programs disturb less. Weights are rounded to the
nearest value: the speed does not depend on their values.
"""

import argparse
import contextlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from antiphon.services.engine.backends.cpu import worker as cpu_worker
from antiphon.services.engine.backends.cpu.worker import load_cpu_worker
from antiphon.services.engine.quantization.choice import PLAIN_WEIGHTS, WeightForm
from antiphon.services.engine.quantization.online import HEAD, QUANTIZED_MATRICES
from antiphon.services.engine.quantization.rounding import quantize_int4, quantize_int8, quantize_nf4
from antiphon.services.engine.quantization.weight import QuantizedWeight
from antiphon.services.engine.worker.interface import ModelWorker
from antiphon.shared.config import EngineSettings
from bench.engine.lookahead import decode, make_core


def in_another_order(weight: Tensor, group_size: int) -> QuantizedWeight:
    """Returns a weight whose groups have inputs from all over the matrix, as activation order makes them."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(0))
    return replace(quantize_int4(weight[:, order], group_size), order=order.to(torch.int32))


ROUND: dict[str, Callable[[Tensor], QuantizedWeight] | None] = {
    "bfloat16": None,
    "int8": quantize_int8,
    "int8, rows in 8 bits": partial(quantize_int8, kind="int8_dynamic"),
    "int4, groups of 128": partial(quantize_int4, group_size=128),
    "int4, groups of 128 in activation order": partial(in_another_order, group_size=128),
    "int4, groups of 32": partial(quantize_int4, group_size=32),
    "NF4, groups of 64": quantize_nf4,
    "NF4, groups of 64, rows in 8 bits": partial(quantize_nf4, kind="int4_dynamic"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode rates with quantized weights.")
    parser.add_argument("--model", type=Path, default=Path("bench/models/llama-160m-shape"))
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    settings = EngineSettings(
        model=str(options.model),
        device="cpu",
        dtype="bfloat16",
        threads=options.threads,
        max_num_seqs=max(options.batches),
        max_model_len=256,
        kv_cache_memory_gb=0.4,
        swap_space=0,
        weight_cache="off",
    )
    workers = {name: load(settings, options.model, name) for name in ROUND}
    print(f"{'weights':<40}{'streams':>8}{'tokens/s':>10}{'speed':>8}{'by CPU time':>13}")
    for batch in options.batches:
        compare(workers, batch, options.tokens, options.rounds)


def load(settings: EngineSettings, model: Path, name: str) -> ModelWorker:
    """Returns a worker whose matrices are rounded as `ROUND` says."""
    with rounding(name, ROUND[name]):
        worker = load_cpu_worker(settings, model)
    if worker is None:
        raise SystemExit("the C++ backend cannot run this model here; the log says why")
    return worker


@contextlib.contextmanager
def rounding(name: str, rounded: Callable[[Tensor], QuantizedWeight] | None) -> Iterator[None]:
    """Patches the C++ worker so that it rounds the matrices of the models that it loads; None: not at all."""

    def quantize(matrix: str, weight: Tensor) -> Tensor | QuantizedWeight:
        if rounded is not None and matrix == HEAD:
            return quantize_int8(weight)
        return rounded(weight) if rounded is not None and matrix in QUANTIZED_MATRICES else weight

    def form(*_arguments: Any, **_options: Any) -> WeightForm:
        return PLAIN_WEIGHTS if rounded is None else WeightForm(name=name, quantize=quantize)

    former, cpu_worker.weight_form = cpu_worker.weight_form, form
    try:
        yield
    finally:
        cpu_worker.weight_form = former


def compare(workers: dict[str, ModelWorker], batch: int, tokens: int, rounds: int) -> None:
    """Prints a line for each form of the weights. The first round is not counted."""
    names = list(workers)
    cores = {name: make_core(workers[name], batch, 0) for name in names}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(-1, rounds):
        for name in names if number % 2 else names[::-1]:
            taken = decode(workers[name], cores[name], "noise", batch, tokens + 1)
            if number >= 0:
                times[name].append(taken)
    for name in names:
        rate = statistics.median(batch * tokens / wall for wall, _ in times[name])
        wall, cpu = (
            statistics.median(
                plain[which] / own[which] for plain, own in zip(times[names[0]], times[name], strict=True)
            )
            for which in (0, 1)
        )
        print(f"{name:<40}{batch:>8}{rate:>10.1f}{wall:>8.2f}{cpu:>13.2f}", flush=True)


if __name__ == "__main__":
    main()
