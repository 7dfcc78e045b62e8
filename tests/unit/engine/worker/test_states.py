"""How many slots of recurrent states a worker has, and how far apart snapshots are."""

from dataclasses import replace

import torch

from antiphon.services.engine.models.recurrent_kinds import ShortConvolution
from antiphon.services.engine.worker.capacity.kv_cache import bytes_per_block
from antiphon.services.engine.worker.capacity.states import (
    INTERVAL_MAX,
    allocate_states,
    num_state_slots,
    rows_with_states,
    running_state_bytes,
    snapshot_bytes_per_block,
    state_interval,
)
from tests.unit.engine.worker.test_kv_cache import DESCRIPTION

BLOCK, DTYPE = 16, torch.float32
SMALL = replace(DESCRIPTION, recurrent=ShortConvolution(layers=frozenset({0, 2}), channels=32, kernel_size=3))
LARGE = replace(SMALL, recurrent=ShortConvolution(layers=frozenset({0, 2}), channels=2**20, kernel_size=3))
SLOTS_BESIDE = 8


def test_a_model_without_states_has_no_slots() -> None:
    assert num_state_slots(DESCRIPTION, 4, 100, BLOCK, DTYPE) == running_state_bytes(DESCRIPTION, 4) == 0
    assert allocate_states(DESCRIPTION, 0, torch.device("cpu")) == ()


def test_snapshots_are_as_far_apart_as_their_memory_allows() -> None:
    size = SMALL.state_bytes
    blocks = state_interval(SMALL, BLOCK, DTYPE) // BLOCK
    assert size <= 0.3 * blocks * bytes_per_block(SMALL, BLOCK, DTYPE)
    assert state_interval(LARGE, BLOCK, DTYPE) == INTERVAL_MAX
    assert snapshot_bytes_per_block(LARGE, BLOCK, DTYPE) == LARGE.state_bytes * BLOCK // INTERVAL_MAX


def test_there_are_three_slots_for_each_sequence_and_one_for_each_snapshot() -> None:
    interval = state_interval(SMALL, BLOCK, DTYPE)
    count = num_state_slots(SMALL, 4, 100, BLOCK, DTYPE)
    assert count == 3 * 4 + SLOTS_BESIDE + -(-100 * BLOCK // interval)
    assert [tuple(states.shape) for states in allocate_states(SMALL, count, torch.device("cpu"))] == [(count, 64)] * 2


def test_states_take_at_most_half_of_the_memory_and_so_limit_the_running_sequences() -> None:
    assert rows_with_states(DESCRIPTION, 64, 0) is None
    assert rows_with_states(LARGE, 64, 2**40) is None
    rows = rows_with_states(LARGE, 64, 200 * LARGE.state_bytes)
    assert rows == (100 - SLOTS_BESIDE) // 3
    assert running_state_bytes(LARGE, rows) <= 100 * LARGE.state_bytes
    assert rows_with_states(LARGE, 64, 0) == 1


def test_the_small_cache_of_a_trial_has_few_slots() -> None:
    """What it takes counts as memory in use when the real one is sized."""
    assert num_state_slots(SMALL, 256, 1, BLOCK, DTYPE) <= 3 + SLOTS_BESIDE + 1
