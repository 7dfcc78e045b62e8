"""How many blocks the sequences of a model take with given settings: `core/paging` with numbers. Imports no PyTorch."""

from antiphon.services.engine.core.paging import MUTUAL_TOKENS, WHOLE, Paging
from antiphon.services.engine.core.plan import default_batched_tokens
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.kv_groups import freed_window, num_groups
from antiphon.shared.config import EngineSettings


def paging_of(settings: EngineSettings, description: DecoderDescription) -> Paging:
    """Returns how many blocks sequences of this model take."""
    together = MUTUAL_TOKENS if description.mutual_images and settings.enable_mm else 0
    return Paging(settings.cache.block_size, num_groups(description) - 1, freed_window(description), together)


def batched_tokens(settings: EngineSettings, *, on_cpu: bool) -> int:
    """Returns the token budget of a step."""
    rows = settings.scheduler.max_num_seqs
    return max(settings.scheduler.max_num_batched_tokens or default_batched_tokens(on_cpu, rows), rows)


def sequence_tokens(settings: EngineSettings, *, on_cpu: bool) -> int:
    """Returns how many tokens of one sequence a step computes at most."""
    return batched_tokens(settings, on_cpu=on_cpu) if settings.scheduler.enable_chunked_prefill else WHOLE


def useful_blocks(settings: EngineSettings, paging: Paging, context: int, *, on_cpu: bool) -> int:
    """Returns how many blocks `max_num_seqs` sequences of this length hold at most.

    The steps in flight compute as many tokens together as one sequence may have in each of them.
    """
    more = paging.blocks_for(2 * min(context, sequence_tokens(settings, on_cpu=on_cpu)))
    decoding = settings.scheduler.max_num_seqs * paging.most_blocks(context, 1)
    return min(
        decoding + paging.num_windowed * more,
        settings.scheduler.max_num_seqs * (1 + paging.num_windowed) * paging.blocks_for(context),
    )
