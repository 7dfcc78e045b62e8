"""Measures core, loop and GPU worker in one process, without bus.

Decode at several batch sizes, greedy and with top-p; a short prompt that joins a batch; a long prefill.

    python -m bench.gpu.engine MODEL_DIRECTORY [--backend auto|torch] [--quantization ifq|fp8] [--batches 1 8 64 256]
                               [--deterministic]

The result also has the times of the forms that products have (`backends/triton/autotune`). With `--deterministic` it
says whether a sequence has the same bits alone and in a batch.

The floor of a decode step is the time to read keys and values once at the copy bandwidth, and of the products with the
weights: to read the weights as they are stored, or to multiply at the GEMM rate, whichever takes longer. The floor of a
prefill is the time of its matrix products at the GEMM rate. The caller measures both rates in the same run and passes
them as options.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from antiphon.services.engine.backends.load import load_worker
from antiphon.services.engine.backends.torch.worker import TorchWorker
from antiphon.services.engine.backends.triton.autotune.kept import Kept, measured_with
from antiphon.services.engine.backends.triton.worker import TritonWorker
from antiphon.services.engine.canary.measure import check_deterministic
from antiphon.services.engine.core.plan import CoreLimits
from antiphon.services.engine.core.request import SequenceSpec
from antiphon.services.engine.engine import Engine
from antiphon.services.engine.executor import Executor
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.steps.loop import StepReport
from antiphon.services.engine.worker.interface import ModelWorker
from antiphon.services.engine.worker.loading.model_files import describe_model
from antiphon.shared.config import EngineSettings, SettingsError
from antiphon.shared.parameters.sampling import SamplingParams

DECODE_STEPS = 64
JOINING, JOINED = 128, 64
PREFILL = 8192


class Runner:
    """Runs sequences through the engine's loop and records the time and the number of tokens of each step."""

    def __init__(self, worker: ModelWorker, max_num_seqs: int) -> None:
        self._worker, self._max_num_seqs = worker, max_num_seqs

    def run(
        self, batch: int, length: int, num_tokens: int, budget: int, seed: int, top_p: float = 0.0, joining: int = 0
    ) -> list[tuple[int, float]]:
        """Runs `batch` random prompts of `length` tokens to their end, with `num_tokens` output tokens each.

        Returns (tokens computed, seconds since the last report) for every step. `budget` is the token budget of a step.
        `top_p`: 0 for greedy sequences. `joining`: tokens of a prompt that joins half-way.
        """
        steps: list[tuple[int, float]] = []
        last = [time.perf_counter()]

        def note(report: StepReport) -> None:
            now = time.perf_counter()
            steps.append((report.num_tokens, now - last[0]))
            last[0] = now

        limits = CoreLimits(max_num_seqs=self._max_num_seqs, max_num_batched_tokens=budget, enable_prefix_caching=False)
        engine = Engine.of_worker(self._worker, limits, note)
        params = SamplingParams(
            max_tokens=num_tokens, temperature=float(top_p > 0.0), top_p=top_p or 1.0, seed=seed, ignore_eos=True
        )

        def add(index: int, length: int) -> None:
            draw = np.random.default_rng([seed, index]).integers(1, self._worker.facts().vocab_size, length)
            engine.add(
                SequenceSpec(sequence_id=f"{seed}-{index}", prompt_token_ids=tuple(draw.tolist()), params=params)
            )

        for index in range(batch):
            add(index, length)
        while engine.step():
            if joining and sum(tokens == batch for tokens, _ in steps) == num_tokens // 2:
                add(batch, joining)
                joining = 0
        torch.cuda.synchronize()
        return steps


def decode_ms(runner: Runner, batch: int, context: int, top_p: float = 0.0) -> float:
    """Returns the median milliseconds of a step in which the whole batch decodes."""
    steps = runner.run(batch, context, DECODE_STEPS, 8192, batch, top_p)
    times = [seconds for tokens, seconds in steps if tokens == batch]
    return 1e3 * statistics.median(times[len(times) // 4 :])


def joining_ms(runner: Runner, batch: int, context: int) -> float:
    """Returns the milliseconds of the step in which a batch decodes and a prompt of `JOINING` tokens joins it."""
    steps = runner.run(batch, context, DECODE_STEPS, 8192, seed=7, joining=JOINING)
    return 1e3 * next(seconds for tokens, seconds in steps if tokens == batch + JOINING)


def prefill_ms(runner: Runner) -> float:
    """Returns the milliseconds from the start to the first token of a long prompt: the shortest of three runs."""
    return 1e3 * min(sum(s for _, s in runner.run(1, PREFILL, 1, PREFILL, seed)) for seed in range(3))


def of_kernels(worker: ModelWorker, max_num_seqs: int, *, deterministic: bool) -> dict[str, object]:
    """Returns how the bits of a sequence differ alone and in a batch, or the times of the forms of products."""
    if not deterministic:
        return {"forms of products, ms": Kept("", measured_with(torch.device("cuda"))).read()}
    try:
        check_deterministic(Executor(worker), CoreLimits(max_num_seqs=max_num_seqs, max_num_batched_tokens=PREFILL))
    except SettingsError as error:
        return {"wrong": str(error)}
    return {"same bits alone and in a batch": True}


def parameters(d: DecoderDescription) -> int:
    """Returns the number of weights that a step multiplies with: all matrices except the embedding."""
    layer = d.hidden_size * (2 * d.q_size + 2 * d.kv_size + 3 * d.intermediate_size)
    return d.num_layers * layer + d.vocab_size * d.hidden_size


def decode_floor_ms(
    d: DecoderDescription, weights_bytes: int, batch: int, context: int, copy_tb_s: float, gemm_tflop_s: float
) -> float:
    """Returns the milliseconds for the products with the weights, and for reading keys and values in 16 bits once."""
    products_ms = max(weights_bytes / copy_tb_s, 2 * parameters(d) * batch / gemm_tflop_s) / 1e9
    return products_ms + 2 * d.num_layers * d.kv_size * 2 * batch * context / copy_tb_s / 1e9


def prefill_floor_ms(d: DecoderDescription, length: int, gemm_tflop_s: float) -> float:
    """Returns the milliseconds for the products with the weights of all layers and for causal attention."""
    body = parameters(d) - d.vocab_size * d.hidden_size
    return (2 * body * length + 2 * length**2 * d.q_size * d.num_layers) / gemm_tflop_s / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--quantization", default="")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 64, 256])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--copy-tb-s", type=float, default=4.3)
    parser.add_argument("--gemm-tflop-s", type=float, default=790.0)
    options = parser.parse_args()
    settings = EngineSettings(
        model=str(options.model),
        device="cuda",
        cuda_backend=options.backend,
        quantization=options.quantization,
        deterministic=options.deterministic,
        max_num_seqs=max(options.batches),
        max_num_batched_tokens=PREFILL,
        max_model_len=PREFILL + 64,
        swap_space=0.0,
    )
    started = time.perf_counter()
    worker = load_worker(settings)
    found: dict[str, object] = {"start_s": round(time.perf_counter() - started, 1), "worker": type(worker).__name__}
    description, runner = describe_model(options.model), Runner(worker, max(options.batches))
    found["num_blocks"] = worker.facts().num_blocks
    assert isinstance(worker, (TritonWorker, TorchWorker))
    found |= of_kernels(worker, max(options.batches), deterministic=options.deterministic)
    # Of the embedding a step reads only a row for each token; a tied one is also the head.
    embedding = 0 if description.tied_embeddings else 2 * description.vocab_size * description.hidden_size
    read_bytes = worker.memory.weights_bytes - embedding
    runner.run(2, 300, 4, PREFILL, seed=99)
    for batch in options.batches:
        ms = decode_ms(runner, batch, options.context)
        rates = options.copy_tb_s, options.gemm_tflop_s
        floor = decode_floor_ms(description, read_bytes, batch, options.context, *rates)
        found[f"decode, batch {batch}"] = {
            "ms": round(ms, 3),
            "tokens_s": round(1e3 * batch / ms, 1),
            "floor_ms": round(floor, 3),
            "of_floor_percent": round(100 * floor / ms, 1),
        }
        sampled = decode_ms(runner, batch, options.context, top_p=0.9)
        found[f"decode, batch {batch}, top-p"] = {"ms": round(sampled, 3), "of_greedy": round(sampled / ms, 3)}
    if max(options.batches) >= JOINED:
        others = JOINED - 1
        ms = joining_ms(runner, others, options.context)
        of_a_step = ms / decode_ms(runner, others, options.context)
        found[f"{JOINING} tokens join {others} sequences"] = {"ms": round(ms, 3), "of_a_step": round(of_a_step, 2)}
    ms, floor = prefill_ms(runner), prefill_floor_ms(description, PREFILL, options.gemm_tflop_s)
    found[f"prefill, {PREFILL}"] = {
        "ms": round(ms, 1),
        "tokens_s": round(1e3 * PREFILL / ms),
        "floor_ms": round(floor, 1),
        "of_floor_percent": round(100 * floor / ms, 1),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
