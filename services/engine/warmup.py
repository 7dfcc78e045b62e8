"""Runs dummy sequences through an executor before it serves (`--use-warmup`), so that one-time costs are paid at start.

The dummy sequences use a separate core, so the engine's core starts with all rows free and an empty prefix cache.
Called by `engine`.
"""

from dataclasses import replace

from antiphon.services.engine.core.core import Core
from antiphon.services.engine.core.plan import CoreLimits, EngineFacts
from antiphon.services.engine.core.request import SequenceSpec
from antiphon.services.engine.executor import Executor
from antiphon.shared.parameters.sampling import SamplingParams

DECODE_STEPS = 2


def warm_up(executor: Executor, limits: CoreLimits) -> int:
    """Prefills a prompt that fills a step if possible, then decodes `max_num_seqs` sequences. Returns the steps run."""
    # This core has no clock, so a gathering batch would never time out. A decoder without a head is warmed up in the
    # same way, because the worker's computation is the same.
    facts = executor.facts()
    pooling = facts.own_pooling() if facts.computes_whole else None
    core = Core(replace(limits, max_batch_size=None), replace(facts, generates=pooling is None))
    for index, length in enumerate(_lengths(limits, facts)):
        params = SamplingParams(max_tokens=1 + DECODE_STEPS, temperature=float(index % 2), ignore_eos=True)
        core.add(
            SequenceSpec(
                sequence_id=f"warm-up {index}",
                prompt_token_ids=(index % facts.vocab_size,) * length,
                params=params,
                pooling=pooling,
            )
        )
    steps = 0
    while not (plan := core.schedule()).empty:
        executor.launch(plan)
        core.apply(plan, executor.collect())
        steps += 1
    return steps


def _lengths(limits: CoreLimits, facts: EngineFacts) -> list[int]:
    """Returns the prompt lengths: one as long as a step allows, the others one token. Empty if no prompt fits."""
    room = facts.paging.capacity(facts.num_blocks, limits.most_tokens)
    longest = min(facts.max_model_len, room) - DECODE_STEPS - 1
    if longest < 1:
        return []
    return [min(longest, limits.max_num_batched_tokens), *[1] * (limits.max_num_seqs - 1)]
