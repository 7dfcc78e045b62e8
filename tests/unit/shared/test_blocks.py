"""Chained content hashes of KV blocks."""

import hashlib
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.shared.blocks import HASH_BYTES, chain_hashes, child_hash, root_hash, split_hashes
from antiphon.shared.codec import pack_ids

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(IDS, st.sampled_from([1, 2, 4, 8, 16]))
def test_only_full_blocks_are_hashed(ids, block_size):
    assert len(split_hashes(chain_hashes(pack_ids(ids), block_size))) == len(ids) // block_size


@given(IDS, IDS, st.sampled_from([1, 2, 4]))
def test_equal_hashes_mean_equal_prefixes(one, two, block_size):
    hashes = [split_hashes(chain_hashes(pack_ids(ids), block_size)) for ids in (one, two)]
    for index, (left, right) in enumerate(zip(*hashes, strict=False)):
        end = (index + 1) * block_size
        assert (left == right) == (one[:end] == two[:end])


@given(IDS, st.binary(max_size=8), st.binary(max_size=8))
def test_different_salts_share_no_hash(ids, one, two):
    left, right = (split_hashes(chain_hashes(pack_ids(ids), 2, salt)) for salt in (one, two))
    assert (left == right) == (one == two or len(ids) < 2)
    assert one == two or not set(left) & set(right)


@given(IDS)
def test_the_chain_can_be_continued_block_by_block(ids):
    parent, expected = root_hash(b"salt"), []
    for start in range(0, len(ids) - 3, 4):
        parent = child_hash(parent, pack_ids(ids[start : start + 4]))
        expected.append(parent)
    assert split_hashes(chain_hashes(pack_ids(ids), 4, b"salt")) == expected


def test_a_hash_is_the_documented_function():
    root = hashlib.sha256(b"antiphon-kv-1salt").digest()[:HASH_BYTES]
    first = hashlib.sha256(root + pack_ids([1, 2])).digest()[:HASH_BYTES]
    assert chain_hashes(pack_ids([1, 2, 3]), 2, b"salt") == first


@pytest.mark.parametrize("seed", ["0", "1"])
def test_hashes_do_not_depend_on_the_process(seed):
    code = "from antiphon.shared.blocks import chain_hashes; print(chain_hashes(bytes(16), 2).hex())"
    environ = {"PYTHONHASHSEED": seed, "PYTHONPATH": "."}
    result = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == chain_hashes(bytes(16), 2).hex()
