"""The host time that the engine's core needs for one step: planning the step and applying its result.

There is no worker: results are invented, so that only the core is timed. Three sweeps vary the number of running
sequences, the number of waiting sequences, and the context length, with the other two numbers fixed. Planning time
should not grow with the number of waiting sequences or the context length.

    python -m bench.engine.core_planning [--steps 200]
"""

import argparse
import gc
import statistics
import time
from dataclasses import dataclass

from antiphon.services.engine.core.core import Core
from antiphon.services.engine.core.plan import CoreLimits, EngineFacts, SampledLogprobs, StepPlan, StepResult
from antiphon.services.engine.core.request import SequenceSpec
from antiphon.shared.parameters.sampling import SamplingParams

BLOCK_SIZE = 16
VOCAB_SIZE = 32000
BUDGET = 8192
_LOGPROB = (SampledLogprobs(-1.0),)


@dataclass(frozen=True)
class Cost:
    """Microseconds per step: median and 99th percentile of planning, median of applying."""

    plan_us: float
    plan_p99_us: float
    apply_us: float


def result_of(plan: StepPlan) -> StepResult:
    num_samples = sum(share.samples for share in plan.scheduled)
    return StepResult(
        step=plan.step, token_ids=((plan.step % VOCAB_SIZE,),) * num_samples, logprobs=(_LOGPROB,) * num_samples
    )


def core_with(running: int, waiting: int, context: int, steps: int) -> Core:
    """Returns a core in which `running` sequences decode in all batch slots, and `waiting` sequences are queued."""
    blocks_each = (context + steps + 64) // BLOCK_SIZE + 2
    limits = CoreLimits(max_num_seqs=running, max_num_batched_tokens=BUDGET, enable_chunked_prefill=True)
    core = Core(
        limits,
        EngineFacts(
            num_blocks=running * blocks_each,
            block_size=BLOCK_SIZE,
            max_model_len=context + steps + 128,
            vocab_size=VOCAB_SIZE,
        ),
    )
    params = SamplingParams(max_tokens=steps + 64)
    for number in range(running + waiting):
        prompt = (number % VOCAB_SIZE, number // VOCAB_SIZE, *(7,) * (context - 2))
        core.add(SequenceSpec(sequence_id=f"s{number}", prompt_token_ids=prompt, params=params, arrival=number))
    while (plan := core.schedule()).num_tokens != running:
        core.apply(plan, result_of(plan))
    core.apply(plan, result_of(plan))
    return core


def measure(core: Core, steps: int) -> Cost:
    planning: list[int] = []
    applying: list[int] = []
    for _ in range(steps):
        before = time.perf_counter_ns()
        plan = core.schedule()
        planned = time.perf_counter_ns()
        result = result_of(plan)
        ready = time.perf_counter_ns()
        core.apply(plan, result)
        applying.append(time.perf_counter_ns() - ready)
        planning.append(planned - before)
    return Cost(
        statistics.median(planning) / 1e3,
        statistics.quantiles(planning, n=100)[98] / 1e3,
        statistics.median(applying) / 1e3,
    )


def report(title: str, cases: list[tuple[int, int, int]], steps: int) -> None:
    print(f"\n{title}\n{'running':>8} {'waiting':>8} {'context':>8} {'plan us':>9} {'p99 us':>9} {'apply us':>9}")
    for running, waiting, context in cases:
        core = core_with(running, waiting, context, steps)
        gc.collect()
        gc.disable()
        cost = measure(core, steps)
        gc.enable()
        print(
            f"{running:8} {waiting:8} {context:8} {cost.plan_us:9.1f} {cost.plan_p99_us:9.1f} {cost.apply_us:9.1f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="steps timed for each line")
    steps = parser.parse_args().steps
    report("running sequences", [(n, 0, 64) for n in (1, 16, 64, 256, 512, 1024)], steps)
    report("waiting sequences", [(256, n, 64) for n in (0, 100, 1000, 10_000)], steps)
    report("context length", [(16, 64, n) for n in (256, 2048, 8192, 32_768)], steps)


if __name__ == "__main__":
    main()
