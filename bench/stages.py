"""Gain of several plans in flight with pipeline stages: as many plans as stages, compared with one plan at a time.

    python -m bench.stages [--model DIRECTORY] [--stages 2] [--batches 2 8 32] [--tokens 16] [--rounds 3]

The engine's processes are started once, with one thread each; both ways run on them in turn, in alternating order.
The output is the medians of the output tokens per second and the median of the ratios of neighbouring runs. The machine
needs a free processor core for each stage.
"""

import argparse
import statistics
import time
from dataclasses import replace

from antiphon.services.engine.core.core import Core
from antiphon.services.engine.core.plan import CoreLimits, StepPlan
from antiphon.services.engine.core.request import SequenceSpec
from antiphon.services.engine.executor import Executor
from antiphon.services.engine.executor.multiproc import MultiprocExecutor
from antiphon.shared.config import EngineSettings
from antiphon.shared.parameters.sampling import SamplingParams

PROMPT_TOKENS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description="Plans in flight with pipeline stages.")
    parser.add_argument("--model", default="bench/models/llama-160m-shape")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="*", default=[2, 8, 32])
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    settings = EngineSettings(
        model=options.model,
        device="cpu",
        threads=1,
        pipeline_parallel_size=options.stages,
        max_num_seqs=max(options.batches),
        max_model_len=512,
        kv_cache_memory_gb=0.2,
    )
    executor = MultiprocExecutor.start(settings)
    try:
        print(f"{'streams':>8}{'one plan':>12}{f'{options.stages} plans':>12}{'ratio':>8}   tokens/s")
        for batch in options.batches:
            compare(executor, batch, options.tokens, options.rounds)
    finally:
        executor.close()


def compare(executor: Executor, batch: int, tokens: int, rounds: int) -> None:
    """Prints a line for one number of streams. The first round is not counted."""
    num_stages = executor.facts().num_stages
    rates: dict[int, list[float]] = {1: [], num_stages: []}
    for number in range(-1, rounds):
        for depth in (1, num_stages) if number % 2 else (num_stages, 1):
            rate = tokens_per_s(executor, batch, tokens, depth)
            if number >= 0:
                rates[depth].append(rate)
    one, several = (statistics.median(each) for each in rates.values())
    ratio = statistics.median(b / a for a, b in zip(*rates.values(), strict=True))
    print(f"{batch:>8}{one:>12.1f}{several:>12.1f}{ratio:>8.2f}", flush=True)


def tokens_per_s(executor: Executor, batch: int, tokens: int, depth: int) -> float:
    """Returns the output tokens per second of `batch` streams that begin together, with `depth` plans in flight."""
    facts = executor.facts()
    limits = CoreLimits(max_num_seqs=batch, max_num_batched_tokens=max(512, batch), enable_prefix_caching=False)
    core = Core(limits, facts if depth > 1 else replace(facts, num_stages=1))
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    for number in range(batch):
        prompt = tuple((7 * number + place) % facts.vocab_size for place in range(PROMPT_TOKENS))
        core.add(SequenceSpec(sequence_id=f"s{number}", prompt_token_ids=prompt, params=params))
    plans: list[StepPlan] = []
    started = time.perf_counter()
    while True:
        plan = core.schedule()
        if not plan.empty:
            executor.launch(plan)
            plans.append(plan)
        if not plans:
            break
        if plan.empty or len(plans) == depth:
            core.apply(plans.pop(0), executor.collect())
    took_s = time.perf_counter() - started
    # An empty plan, which computes nothing, gives the rows back for the next core.
    executor.launch(StepPlan(step=plan.step, freed_rows=core.residency.rows.announce()))
    executor.collect()
    return batch * tokens / took_s


if __name__ == "__main__":
    main()
