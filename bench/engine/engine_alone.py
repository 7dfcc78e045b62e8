"""Rates of the engine's core and worker in one process, without bus, gateway or HTTP.

    python bench/engine/engine_alone.py MODEL_DIRECTORY [--batches 1 8 32] [--context 128] [--steps 32] [--threads N]

Prints decode rates at several batch sizes and a prefill rate. The machine's read bandwidth is measured between the
steps, and its matrix multiplication rate between the runs. On a shared machine only the shares of these limits are
meaningful.

    decode    each sequence has a prompt of `context` tokens; median time of the steps in which all sequences decode
    prefill   one prompt of `prefill` tokens, in one or more chunks
    read      bytes of weights per step / time, as a share of the best way to read, and of a plain sum (medians)
    GEMM      operations (`bench.limits_of_machine.roofline`) / time, as a share of the measured matrix
              multiplication rate
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from antiphon.services.engine.backends.load import load_worker  # noqa: E402
from antiphon.services.engine.backends.torch.worker import TorchWorker  # noqa: E402
from antiphon.services.engine.core.plan import CoreLimits  # noqa: E402
from antiphon.services.engine.core.request import SequenceSpec  # noqa: E402
from antiphon.services.engine.engine import Engine  # noqa: E402
from antiphon.services.engine.models.description import DecoderDescription  # noqa: E402
from antiphon.services.engine.steps.loop import StepReport  # noqa: E402
from antiphon.services.engine.worker.dtypes import choose_dtype, choose_torch_dtype  # noqa: E402
from antiphon.services.engine.worker.interface import ModelWorker  # noqa: E402
from antiphon.services.engine.worker.loading.model_files import describe_model  # noqa: E402
from antiphon.shared.config import EngineSettings  # noqa: E402
from antiphon.shared.parameters.sampling import SamplingParams  # noqa: E402
from bench.limits_of_machine import roofline  # noqa: E402  (after the path)
from bench.limits_of_machine.probe import Reads, gemm_rate, read_rates  # noqa: E402  (after the path)

TRIES = 3
STEPS_A_READ = 4
"""Number of steps between two measurements of the read bandwidth."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Rates of the engine's core and worker alone.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--prefill", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    length = max(options.context + options.steps + 8, options.prefill + 1)
    settings = EngineSettings(
        model=str(options.model),
        dtype=options.dtype,
        threads=options.threads,
        max_num_seqs=max(options.batches),
        max_model_len=length,
    )
    started = time.perf_counter()
    worker = load_worker(settings)
    print(f"loaded in {time.perf_counter() - started:.2f} s, {worker.facts().num_blocks} blocks")
    decoder = describe(options.model, options.dtype, worker)
    weight_bytes = roofline.weight_bytes(decoder)
    print(f"{'run':<24}{'tok/s':>10}{'ms/step':>10}{'probe GB/s':>12}{'read':>7}{'by sum':>8}", end="")
    print(f"{'probe GF/s':>12}{'GEMM':>7}")
    for batch in options.batches:
        reads, gemm = Reads(weight_bytes), probe_gemm(decoder.dtype)
        seconds = decode(worker, batch, options.context, options.steps, options.temperature, reads.once)
        bandwidth = reads.rates(statistics.median)
        step = roofline.decode_step(decoder, batch, options.context + options.steps // 2)
        row(f"decode, batch {batch}", batch, seconds, weight_bytes, step.operations, bandwidth, gemm)
    bandwidth, gemm = read_rates(weight_bytes, TRIES), probe_gemm(decoder.dtype)
    seconds = prefill(worker, options.prefill)
    step = roofline.prompt_step(decoder, 1, options.prefill)
    row(f"prefill, {options.prefill} tokens", options.prefill, seconds, weight_bytes, step.operations, bandwidth, gemm)


def row(
    name: str,
    tokens: int,
    seconds: float,
    weight_bytes: int,
    operations: int,
    bandwidth: tuple[float, float],
    gemm: float,
) -> None:
    by_sum, best_read = bandwidth[0], max(bandwidth)
    rate, share = weight_bytes / seconds, operations / seconds / gemm
    reads = f"{best_read / 1e9:>12.1f}{rate / best_read:>7.0%}{rate / by_sum:>8.0%}"
    rates = f"{tokens / seconds:>10.1f}{seconds * 1e3:>10.2f}{reads}{gemm / 1e9:>12.0f}"
    print(f"{name:<24}{rates}{share:>7.0%}", flush=True)


def decode(
    worker: ModelWorker, batch: int, context: int, steps: int, temperature: float, read: Callable[[], None]
) -> float:
    """Returns the median seconds of a step in which all sequences decode. Calls `read` after `STEPS_A_READ` steps."""
    params = SamplingParams(max_tokens=steps, temperature=temperature, ignore_eos=True)
    times = run(worker, [make_prompt(worker, context, seed) for seed in range(batch)], params, read)
    return statistics.median(seconds for tokens, sequences, seconds in times if tokens == sequences == batch)


def prefill(worker: ModelWorker, length: int) -> float:
    """Returns the seconds from the start to the first token of a prompt: the shorter of two runs."""
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    runs = [run(worker, [make_prompt(worker, length, seed)], params) for seed in range(2)]
    return min(sum(seconds for _, _, seconds in times) for times in runs)


class OneAtATime:
    """A worker without the pipelined interface, so that no step is planned before the last one has ended."""

    def __init__(self, worker: ModelWorker) -> None:
        self.facts, self.run, self.close = worker.facts, worker.run, worker.close


def run(
    worker: ModelWorker, prompts: list[tuple[int, ...]], params: SamplingParams, read: Callable[[], None] | None = None
) -> list[tuple[int, int, float]]:
    """Runs all prompts to their end. Returns for every step: tokens computed, sequences that got one, and seconds.

    Calls `read`, if given, after every `STEPS_A_READ` steps.
    """
    reports: list[StepReport] = []
    limits = CoreLimits(max_num_seqs=len(prompts), enable_prefix_caching=False)
    # With one plan in flight, the time of `Engine.step` is the time of one step.
    engine = Engine.of_worker(OneAtATime(worker), limits, reports.append)
    for index, prompt in enumerate(prompts):
        engine.add(SequenceSpec(sequence_id=str(index), prompt_token_ids=prompt, params=params))
    times: list[tuple[int, int, float]] = []
    while engine.has_work:
        started = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - started
        times.append((reports[-1].num_tokens, len(reports[-1].outcomes), seconds))
        if read is not None and len(times) % STEPS_A_READ == 0:
            read()
    return times


def make_prompt(worker: ModelWorker, length: int, seed: int) -> tuple[int, ...]:
    generator = np.random.default_rng([length, seed])
    return tuple(generator.integers(0, worker.facts().vocab_size, length).tolist())


def describe(directory: Path, dtype: str, worker: ModelWorker) -> DecoderDescription:
    """Returns the model's description with the data type in which the worker runs it."""
    decoder, device = describe_model(directory), torch.device("cpu")
    chosen = (
        choose_torch_dtype(dtype, decoder.dtype, device, directory)
        if isinstance(worker, TorchWorker)
        else choose_dtype(dtype, decoder.dtype, device)
    )
    return dataclasses.replace(decoder, dtype=str(chosen).removeprefix("torch."))


def probe_gemm(dtype: str) -> float:
    """Returns the operations per second of a matrix multiplication in `dtype` or float32, whichever is faster."""
    return gemm_rate(TRIES, tuple({dtype, "float32"}))


if __name__ == "__main__":
    main()
