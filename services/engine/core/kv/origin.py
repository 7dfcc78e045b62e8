"""Where the KV of a prompt came from when its sequence first ran, and why the rest was computed. Pure."""

from antiphon.services.engine.core.kv.reuse import Reusable
from antiphon.services.engine.core.sequence import Sequence
from antiphon.shared.messages import KV_MISSES, EngineCounters, KvMiss, KvOrigin


def note_origin(
    sequence: Sequence, found: Reusable, block_size: int, tally: EngineCounters, *, has_cache: bool
) -> None:
    """Records it in the sequence, and counts the tokens that are computed by their reason.

    `has_cache`: whether the engine has a prefix cache.
    """
    num_cached = len(found.shared) * block_size if found.from_host else found.num_tokens
    num_read = found.num_tokens - num_cached
    num_computed = sequence.num_tokens - found.num_tokens
    why = _miss(sequence, found, num_computed, block_size, has_cache)
    sequence.kv_origin = KvOrigin(
        num_cached=num_cached,
        num_stored=num_read if sequence.loads_stored else 0,
        num_received=0 if sequence.loads_stored else num_read,
        num_computed=num_computed,
        why=why,
    )
    index, before = KV_MISSES.index(why), tally.computed_because or (0,) * len(KV_MISSES)
    tally.computed_because = (*before[:index], before[index] + num_computed, *before[index + 1 :])


def _miss(sequence: Sequence, found: Reusable, num_computed: int, block_size: int, has_cache: bool) -> KvMiss:
    if not has_cache:
        return "no_cache"
    if not sequence.reuses_kv:
        return "results"
    if num_computed <= block_size:
        return "last"
    if sequence.kv_miss:
        return sequence.kv_miss
    return "no_state" if found.num_known > found.num_tokens else "new"
