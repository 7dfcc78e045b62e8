"""The memory of recurrent states: how many slots there are, how far apart snapshots are, and the tensors.

    states[layer]   [num_slots, state size] float32, for each layer with a recurrent state

The core decides what each slot holds (`core.kv.states`). Called by the workers at start-up.
"""

import torch
from torch import Tensor

from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.worker.capacity.kv_cache import bytes_per_block, zeros_on_demand

SLOTS_OF_ROW = 3
"""Slots that a running sequence may need at once: its state, one before its last token, and the next one."""
_MORE_SLOTS = 8
_SNAPSHOT_SHARE = 0.25
"""Snapshots may take this part of the memory of the KV of their tokens."""
INTERVAL_MAX = 1024
"""Most tokens from one snapshot to the next, also if the states are so large that snapshots take more memory."""


def state_interval(description: DecoderDescription, block_size: int, dtype: torch.dtype) -> int:
    """Returns the number of tokens from one snapshot to the next: whole blocks; 0 for a model without states.

    `dtype` is the type of the KV cache.
    """
    if not description.state_bytes:
        return 0
    blocks = description.state_bytes / (_SNAPSHOT_SHARE * bytes_per_block(description, block_size, dtype))
    return block_size * max(1, min(round(blocks), INTERVAL_MAX // block_size))


def num_state_slots(
    description: DecoderDescription, max_num_seqs: int, num_blocks: int, block_size: int, dtype: torch.dtype
) -> int:
    """Returns the number of slots: those that running sequences need, and snapshots for all tokens of the KV cache.

    There are no more than for a sequence in each block, so that the small caches of trial steps have few of them.
    """
    interval = state_interval(description, block_size, dtype)
    if not interval:
        return 0
    return SLOTS_OF_ROW * min(max_num_seqs, num_blocks) + _MORE_SLOTS + -(-num_blocks * block_size // interval)


def rows_with_states(description: DecoderDescription, max_num_seqs: int, room: int) -> int | None:
    """Returns how many sequences may run so that their states take at most half of `room` bytes; None if all may."""
    if not description.state_bytes:
        return None
    slots = room // 2 // description.state_bytes - _MORE_SLOTS
    rows = max(1, slots // SLOTS_OF_ROW)
    return rows if rows < max_num_seqs else None


def running_state_bytes(description: DecoderDescription, max_num_seqs: int) -> int:
    """Returns the memory of the slots that running sequences need."""
    return (SLOTS_OF_ROW * max_num_seqs + _MORE_SLOTS) * description.state_bytes


def snapshot_bytes_per_block(description: DecoderDescription, block_size: int, dtype: torch.dtype) -> int:
    """Returns the memory of snapshots for each block of the KV cache."""
    interval = state_interval(description, block_size, dtype)
    return -(-description.state_bytes * block_size // interval) if interval else 0


def allocate_states(description: DecoderDescription, num_slots: int, device: torch.device) -> tuple[Tensor, ...]:
    """Returns zeroed tensors, whose memory on a CPU is taken when it is first written."""
    recurrent = description.recurrent
    if recurrent is None:
        return ()
    make = zeros_on_demand if device.type == "cpu" else torch.zeros
    shape = (num_slots, recurrent.state_size)
    return tuple(make(shape, dtype=torch.float32, device=device) for _ in recurrent.layers)
