"""Runs made-up sequences through a worker before it serves (`--use-warmup`): what is slow only once is slow now.

They go through a core of their own: afterwards no row is used and no block has a name. Called by the engine service.
"""

from dataclasses import replace

from services.engine.core.core import Core
from services.engine.core.plan import CoreLimits, EngineFacts
from services.engine.core.request import SequenceSpec
from services.engine.worker.seam import ModelWorker
from shared.sampling import SamplingParams

DECODE_STEPS = 2


def warm_up(worker: ModelWorker, limits: CoreLimits) -> int:
    """Prefills as much as a step may have, decodes with as many sequences as it takes; returns the steps."""
    # Made-up sequences have no time to gather in.
    core = Core(replace(limits, max_batch_size=None), worker.facts())
    for index, length in enumerate(_lengths(limits, worker.facts())):
        params = SamplingParams(max_tokens=1 + DECODE_STEPS, temperature=float(index % 2), ignore_eos=True)
        core.add(SequenceSpec(f"warm-up {index}", (index % worker.facts().vocab_size,) * length, params))
    steps = 0
    while not (plan := core.schedule()).empty:
        core.apply(plan, worker.run(plan))
        steps += 1
    return steps


def _lengths(limits: CoreLimits, facts: EngineFacts) -> list[int]:
    """One prompt as long as a step allows and, to decode beside it, short ones."""
    longest = min(facts.max_model_len, facts.num_blocks * facts.block_size) - DECODE_STEPS - 1
    if longest < 1:
        return []
    return [min(longest, limits.max_num_batched_tokens), *[1] * (limits.max_num_seqs - 1)]
