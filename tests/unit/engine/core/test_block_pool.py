"""Blocks to the number, and the free list to the order."""

import pytest

from antiphon.services.engine.core.kv.block_pool import BlockPool


def free_list(pool: BlockPool) -> list[int]:
    return list(pool.eviction_order())


def name(index: int) -> bytes:
    return bytes([index]) * 16


def named(pool: BlockPool, count: int, first: int = 0) -> list[int]:
    """Takes blocks and names them in order."""
    blocks = pool.allocate(count)
    assert blocks is not None
    for index, block in enumerate(blocks, first):
        assert pool.register(block, name(index))
    return blocks


def test_fresh_blocks_are_taken_in_order() -> None:
    pool = BlockPool(5)
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(1) == [2]
    assert free_list(pool) == [3, 4]
    assert pool.num_free == 2


def test_an_allocation_that_cannot_be_met_changes_nothing() -> None:
    pool = BlockPool(3)
    assert pool.allocate(4) is None
    assert free_list(pool) == [0, 1, 2]
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_nameless_blocks_are_used_again_before_anything_else() -> None:
    pool = BlockPool(6)
    table = pool.allocate(3)
    assert table == [0, 1, 2]
    pool.free(table or ())
    assert free_list(pool) == [0, 1, 2, 3, 4, 5]


def test_the_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    pool = BlockPool(4)
    pool.free(named(pool, 3))
    assert free_list(pool) == [3, 2, 1, 0]


def test_prefixes_are_evicted_in_the_order_in_which_they_were_freed() -> None:
    pool = BlockPool(4)
    first, second = named(pool, 2), named(pool, 2, first=2)
    pool.free(second)
    pool.free(first)
    assert free_list(pool) == [3, 2, 1, 0]
    assert pool.allocate(3) == [3, 2, 1]
    assert [pool.find(name(index)) for index in range(4)] == [0, None, None, None]


def test_a_partly_named_table_gives_its_nameless_tail_first() -> None:
    pool = BlockPool(4)
    table = pool.allocate(3)
    assert table is not None
    pool.register(table[0], name(0))
    pool.register(table[1], name(1))
    pool.free(table)
    assert free_list(pool) == [2, 3, 1, 0]


def test_a_free_block_keeps_its_name_until_it_is_taken() -> None:
    pool = BlockPool(2)
    pool.free(named(pool, 1))
    assert pool.find(name(0)) == 0
    assert pool.num_free == 2
    assert pool.allocate(2) == [1, 0]
    assert pool.find(name(0)) is None
    assert pool.hash_of(0) is None
    assert pool.num_named == 0


def test_sharing_a_free_block_takes_it_off_the_free_list_with_its_name() -> None:
    pool = BlockPool(4)
    pool.free(named(pool, 3))
    pool.share([1])
    assert free_list(pool) == [3, 2, 0]
    assert pool.find(name(1)) == 1
    assert pool.ref_count(1) == 1


def test_a_shared_block_is_free_only_when_its_last_holder_frees_it() -> None:
    pool = BlockPool(2)
    blocks = named(pool, 1)
    pool.share(blocks)
    assert pool.ref_count(0) == 2
    pool.free(blocks)
    assert pool.num_free == 1
    pool.free(blocks)
    assert pool.num_free == 2
    assert free_list(pool) == [1, 0]


def test_use_makes_a_prefix_young_again() -> None:
    pool = BlockPool(4)
    first, second = named(pool, 2), named(pool, 2, first=2)
    pool.free(first)
    pool.free(second)
    pool.share(first)
    pool.free(first)
    assert free_list(pool) == [3, 2, 1, 0]


def test_only_the_first_block_with_a_content_gets_the_name() -> None:
    pool = BlockPool(3)
    named(pool, 1)
    pool.allocate(1)
    assert not pool.register(1, name(0))
    assert pool.find(name(0)) == 0
    assert pool.hash_of(1) is None


def test_freeing_twice_is_a_broken_invariant() -> None:
    pool = BlockPool(2)
    table = pool.allocate(1)
    assert table is not None
    pool.free(table)
    with pytest.raises(AssertionError, match="more often"):
        pool.free(table)


def test_naming_a_free_block_is_a_broken_invariant() -> None:
    with pytest.raises(AssertionError, match="is free"):
        BlockPool(1).register(0, name(0))
