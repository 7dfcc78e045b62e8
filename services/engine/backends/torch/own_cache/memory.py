"""Divides the memory between transformers' caches: computes the numbers of sequences and of tokens that fit.

A sequence takes a fixed amount of memory, for its states, and an amount for each token. The scheduler counts tokens in
blocks, as it does with paged KV; blocks are only counted here. Pure.
"""

import logging
from dataclasses import dataclass

from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.worker.capacity.kv_cache import Budget, KvPlan, context_length
from antiphon.services.engine.worker.capacity.memory_advice import measures
from antiphon.shared.config import EngineSettings
from antiphon.shared.errors import ServiceError

logger = logging.getLogger(__name__)

_GIB = 2**30
STATES_SHARE = 0.5
"""Maximum share of the cache's memory for the fixed part of all sequences."""


@dataclass(frozen=True, slots=True)
class CacheBytes:
    """Memory of one sequence's cache: `fixed` bytes whatever its length, and `per_token` for each token."""

    fixed: int
    per_token: int


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The number of blocks, the longest context, and the maximum number of running sequences."""

    kv: KvPlan
    num_sequences: int


def plan_caches(
    settings: EngineSettings, description: DecoderDescription, size: CacheBytes, budget: Budget, *, on_cpu: bool
) -> CachePlan:
    """Returns the plan for the budget. If no context is given, the model's is shortened, with a warning, until it fits.

    There is room for one more sequence than `num_sequences`: the engine's hidden test sequence (`canary`). Raises
    `ServiceError` if there is no room for one sequence or for a given context.
    """
    block_size, own = settings.cache.block_size, context_length(settings, description)
    most = settings.scheduler.max_num_seqs
    if size.fixed:
        most = min(most, int(budget.asked_bytes * STATES_SHARE) // size.fixed)
    if most < 2 and settings.scheduler.max_num_seqs > 1:
        raise ServiceError(
            "invalid_value",
            f"The state of one sequence takes {size.fixed / _GIB:.2f} GiB, and there are "
            f"{budget.asked_bytes / _GIB:.2f} GiB for two sequences. "
            + measures(settings, on_cpu=on_cpu, prepared=True),
            param="model",
        )
    useful, block_bytes = most * -(-own // block_size), block_size * size.per_token
    left = budget.asked_bytes - most * size.fixed
    fitting = useful if not block_bytes else max(0, left) // block_bytes
    num_blocks = settings.cache.num_gpu_blocks_override or min(fitting, useful)
    room = num_blocks * block_size
    if room < own and (settings.scheduler.max_model_len is not None or num_blocks < 1):
        raise ServiceError(
            "invalid_value",
            f"The cache has room for {room} tokens, less than the context of {own} tokens. "
            f"{measures(settings, on_cpu=on_cpu, context=own, prepared=True)}",
            param="max_model_len",
        )
    if room < own:
        logger.warning("context shortened from %d to %d tokens: that is what there is memory for", own, room)
    return CachePlan(
        KvPlan(num_blocks, min(own, room)), max(1, most - 1) if most < settings.scheduler.max_num_seqs else most
    )
