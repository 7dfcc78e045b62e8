"""Invariants that hold between any two operations of the core. Tests call `check` after each operation.

`check` reads the whole state, so its time grows with the number of blocks and sequences. `check_idle` is for an engine
in production that has nothing to compute; its time does not depend on the number of blocks. Neither changes anything.
"""

import math
from collections import Counter

from antiphon.services.engine.core.core import Core
from antiphon.services.engine.core.kv.block_pool import BlockPool
from antiphon.services.engine.core.sequence import Sequence, Status


def check(core: Core) -> None:
    """Raises AssertionError, with a description, if an invariant is violated."""
    _check_free_list(core.pool)
    _check_free_list(core.swap.pool)
    _check_references(core)
    core.states.check(*_state_holders(core))
    _check_names(core)
    _check_rows(core)
    _check_queues(core)
    _check_host(core)
    for sequence in core.residency.rows.holders():
        _check_counters(core, sequence)


def check_idle(core: Core, now_s: float) -> None:
    """Raises AssertionError, with a description, if an idle core still holds something.

    Call it on the core's thread when `schedule` has returned an empty plan and no plan is in flight. Sequences may then
    wait only for a batch to gather, for KV or for blocks that are held for other engines. No sequence may run and no
    other block or row may be held; without live sequences, no host block or sequence group either.
    """
    residency = core.residency
    assert not residency.running, f"{len(residency.running)} sequences run and have nothing to compute"
    transfers = core.transfers
    # Sequences may lack the blocks that are held until another engine has received them.
    held_for_others = transfers.num_saved_blocks
    num_queued = len(core.sequences) - transfers.num_waiting
    gathering = math.isfinite(core.scheduler.seconds_to_batch(now_s))
    assert gathering or held_for_others or not num_queued, f"{num_queued} sequences wait although nothing runs"
    held = list(residency.rows.holders())
    assert not held, f"rows are held by {[sequence.sequence_id for sequence in held]}"
    num_held = core.pool.num_blocks - core.pool.num_free - held_for_others
    assert not num_held, f"{num_held} blocks are held by no sequence"
    if not core.sequences:
        assert not residency.num_waiting, f"{residency.num_waiting} waiting sequences counted, none live"
        num_host = core.swap.pool.num_blocks - core.swap.pool.num_free - len(list(transfers.host_blocks()))
        assert not num_host, f"{num_host} host blocks are held by no sequence"
        assert not core.groups, f"{len(core.groups)} sequence groups without a sequence"


def _state_holders(core: Core) -> tuple[list[Sequence], Counter[int]]:
    """Returns the sequences that may hold states, and how often others hold each slot: transfers."""
    sequences = [*core.residency.rows.holders(), *core.scheduled_sequences(), *core.transfers.waiting()]
    pieces = core.transfers.pieces
    sending = {slot: -(-count // pieces.count) for slot, count in pieces.sending.items()}
    unique = {id(sequence): sequence for sequence in sequences}
    return list(unique.values()), Counter(pieces.loading) + Counter(sending)


def _check_free_list(pool: BlockPool) -> None:
    """Every free block is on the free list exactly once; no held block is on it."""
    free = list(pool.eviction_order())
    assert len(free) == len(set(free)), f"blocks twice on the free list: {free}"
    assert len(free) == pool.num_free, f"{pool.num_free} free blocks counted, {len(free)} on the list"
    unheld = {block for block in range(pool.num_blocks) if pool.is_free(block)}
    assert set(free) == unheld, f"free list and reference counts differ in {set(free) ^ unheld}"


def _check_references(core: Core) -> None:
    """A block's reference count is the number of tables and transfers that hold it.

    Shared blocks hold only scheduled tokens.
    """
    held = Counter(core.transfers.saved_references())
    block_size = core.facts.block_size
    for sequence in core.residency.rows.holders():
        assert len(set(sequence.block_table)) == len(sequence.block_table), f"{sequence.sequence_id}: a block twice"
        held.update(sequence.block_table)
        first = sequence.num_scheduled_tokens + (sequence.again > 0)
        held.update(sequence.window_blocks)
        _check_columns(core, sequence)
        for block in (*sequence.block_table[first // block_size :], *_unread_columns(core, sequence, first)):
            assert core.pool.ref_count(block) == 1, f"{sequence.sequence_id} writes into block {block}, which is shared"
    for block in range(core.pool.num_blocks):
        count = core.pool.ref_count(block)
        assert count == held[block], f"block {block}: {count} references, in {held[block]} tables"


def _check_columns(core: Core, sequence: Sequence) -> None:
    """A sequence holds all columns that a later step may read, up to the end of its block table."""
    paging, first, name = core.windows.paging, sequence.window_first, sequence.sequence_id
    if not core.windows:
        assert not sequence.window_blocks, f"{name} has columns"
        return
    num_columns = len(sequence.block_table) - first
    assert len(sequence.window_blocks) == num_columns * core.windows.groups, f"{name}: {num_columns} columns"
    next_token = sequence.num_computed_tokens
    assert first <= paging.first_read(next_token), f"{name}: column {first} is the first of token {next_token}"


def _unread_columns(core: Core, sequence: Sequence, num_tokens: int) -> list[int]:
    """Returns the blocks of the columns with tokens after the first `num_tokens`."""
    start = max(0, num_tokens // core.facts.block_size - sequence.window_first)
    return sequence.window_blocks[core.windows.groups * start :]


def _check_host(core: Core) -> None:
    """Each used host block is held by one load or waiting sequence. A sequence has as many as its host tokens need."""
    held = Counter(core.transfers.host_blocks())
    for sequence in core.scheduled_sequences():
        held.update(sequence.host_blocks)
        held.update(sequence.host_windows)
        num_blocks = -(-sequence.num_host_tokens // core.facts.block_size) - sequence.num_host_skipped
        assert len(sequence.host_blocks) == num_blocks, f"{sequence.sequence_id}: {num_blocks} blocks on the host"
        waits = sequence.status in (Status.WAITING, Status.PREEMPTED)
        assert not num_blocks or waits, f"{sequence.sequence_id}: on the host and runs"
    for block in range(core.swap.pool.num_blocks):
        assert core.swap.pool.ref_count(block) == held[block], f"host block {block} is held {held[block]} times"


def _check_names(core: Core) -> None:
    """Hashes map to their blocks; a held block's hash is the one of its holder's content and is published."""
    pool = core.pool
    names = [(block, name) for block in range(pool.num_blocks) if (name := pool.hash_of(block)) is not None]
    assert len(names) == pool.num_named, f"{pool.num_named} names for {len(names)} named blocks"
    for block, name in names:
        assert pool.find(name) == block, f"block {block} is not found by its name"
    for sequence in core.residency.rows.holders():
        for place, block in enumerate(sequence.window_blocks):
            index, group = divmod(place, core.windows.groups)
            name, index = pool.hash_of(block), index + sequence.window_first
            if name is not None:
                wanted = core.windows.names(sequence.block_hashes[index])[group]
                assert name == wanted, f"{sequence.sequence_id}: wrong content in block {block} of column {index}"
        for index, block in enumerate(sequence.block_table):
            name = pool.hash_of(block)
            if name is not None:
                assert name == sequence.block_hashes[index], f"{sequence.sequence_id}: wrong content in block {block}"
                assert index < sequence.num_published_blocks, f"{sequence.sequence_id}: block {block} named too early"


def _check_rows(core: Core) -> None:
    """Every row is free, reserved or held by one sequence that is running, or finished with a plan in flight."""
    rows = core.residency.rows
    holders = list(rows.holders())
    num_held = sum(not sequence.canary for sequence in holders)
    assert num_held + rows.num_free + rows.num_reserved == len(rows), (
        f"{num_held} rows held, {rows.num_free} free, {rows.num_reserved} reserved, {len(rows)} in all"
    )
    to_come = sum(one.num_rows - 1 for one in core.residency.running if len(one.beams) == 1)
    assert rows.num_reserved == to_come, f"{rows.num_reserved} rows reserved, {to_come} beams to come"
    num_loras = sum(sequence.adapter is not None for sequence in holders)
    assert rows.adapters.num_users == num_loras, f"{rows.adapters.num_users} users of adapters counted"
    num_prompts = sum(sequence.prompt_adapter is not None for sequence in holders)
    assert rows.prompt_adapters.num_users == num_prompts, f"{rows.prompt_adapters.num_users} users counted"
    for sequence in holders:
        assert (sequence.adapter is None) == (sequence.adapter_slot < 0), f"{sequence.sequence_id}: wrong adapter slot"
        assert sequence.beams or not rows.is_vacant(sequence.row), f"{sequence.sequence_id} has a vacant row"
    for sequence in holders:
        assert rows[sequence.row] is sequence, f"{sequence.sequence_id} does not know its row"
        leaving = sequence.status is Status.FINISHED and sequence.num_in_flight > 0
        assert leaving or sequence.status is Status.RUNNING, f"{sequence.sequence_id}: {sequence.status} with a row"


def _check_queues(core: Core) -> None:
    """Every live sequence is in exactly one queue; the running sequences are in order of age."""
    residency, idle = core.residency, core.residency.yielding.queue
    running, waiting = residency.running, [*residency.waiting, *idle]
    for queue in (residency.waiting, idle):
        found = list(queue)
        assert len(found) == queue.num_waiting, "the number of waiting sequences is wrong"
        assert sum(s.num_tokens for s in found) == queue.num_tokens, "the number of waiting tokens is wrong"
    assert not any(sequence.idle for sequence in residency.waiting), "an idle sequence waits among the ordinary ones"
    ages = [sequence.age for sequence in running]
    assert ages == sorted(set(ages)), f"running sequences out of order: {ages}"
    in_lanes = [sequence for lane in core.scheduler.lanes for sequence in lane.waiting()]
    queued = Counter(map(id, [*running, *in_lanes]))
    live = Counter(map(id, core.scheduled_sequences()))
    assert queued == live, "the queues do not hold exactly the live sequences"
    for sequence in running:
        assert sequence.status is Status.RUNNING, f"{sequence.sequence_id} runs as {sequence.status}"
    for sequence in waiting:
        assert sequence.status in (Status.WAITING, Status.PREEMPTED), (
            f"{sequence.sequence_id} waits as {sequence.status}"
        )
        assert not sequence.block_table, f"{sequence.sequence_id} waits with blocks"
        assert sequence.row < 0, f"{sequence.sequence_id} waits with a row"
        assert sequence.num_scheduled_tokens == 0, f"{sequence.sequence_id} waits with scheduled tokens"


def _check_counters(core: Core, sequence: Sequence) -> None:
    """Counters are in order; the block table covers the scheduled tokens and at most the draft tokens besides."""
    name, block_size = sequence.sequence_id, core.facts.block_size
    computed, scheduled = sequence.num_computed_tokens, sequence.num_scheduled_tokens
    assert 0 <= computed <= scheduled, f"{name}: {computed} computed, {scheduled} scheduled"
    assert (computed == scheduled) == (sequence.num_in_flight == 0), f"{name}: {scheduled - computed} tokens in flight"
    assert sequence.num_published_blocks * block_size <= computed, f"{name}: blocks published before they were computed"
    assert sequence.num_tokens <= core.checks.max_model_len, f"{name}: {sequence.num_tokens} tokens"
    known = scheduled + (sequence.again > 0)
    least, most = (-(-count // block_size) for count in (known, known + core.num_speculative_tokens))
    num_blocks = len(sequence.block_table) + (sequence.copied_block is not None)
    if sequence.canary:  # gets all its blocks when it joins
        most = num_blocks
    assert least <= num_blocks <= most, f"{name}: {num_blocks} blocks for {scheduled} tokens"
    if sequence.status is Status.RUNNING:
        in_all = sequence.num_tokens + sequence.num_pending_tokens
        assert known <= in_all, f"{name}: {known} of {in_all} tokens scheduled"
        waits = any(beam.num_unscheduled_tokens > 0 or beam.num_in_flight for beam in sequence.beams)
        busy = sequence.num_unscheduled_tokens > 0 or sequence.num_in_flight or waits
        assert busy, f"{name} runs and has nothing to do"
    if sequence.beams and sequence.status is Status.RUNNING:
        _check_beams(sequence)


def _check_beams(sequence: Sequence) -> None:
    """The beams of a search have the same length and different tokens; the copied block is another beam's last one."""
    name, beams = sequence.sequence_id, sequence.beams
    assert sequence in beams, f"{name} is not among its beams"
    assert len({beam.num_tokens for beam in beams}) == 1, f"{name}: beams of different lengths"
    assert len({bytes(beam.tokens) for beam in beams}) == len(beams), f"{name}: two beams with the same tokens"
    if sequence.copied_block is not None:
        holders = [beam for beam in beams if sequence.copied_block in beam.block_table]
        assert holders, f"{name}: nobody holds block {sequence.copied_block}, which is to be copied"
