"""KV between an engine of several processes and one of another number, and what ranks read and write of a block."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from antiphon.services.engine.executor.rank_memory import RankMemory, parts_of, serve_blocks
from antiphon.services.engine.kv.layout import KvLayout
from antiphon.services.engine.kv.pieces import Bytes, checksum
from antiphon.services.engine.parallel.shard import Shard, local_description
from antiphon.services.engine.worker.loading.model_files import describe_model
from tests.models import make_model
from tests.unit.engine.kv.engines import PROMPT, Running, run, started

TORCH = {"cpu_backend": "torch"}
WINDOWED = ["sliding_attention"]


class PartMemory:
    """The blocks of one rank, cut out of whole ones."""

    own = None

    def __init__(self, blocks: Bytes, layout: KvLayout) -> None:
        self.blocks, self.layout = blocks, layout

    def read(self, block: int, out: Bytes) -> int:
        out[:] = self.blocks[block][:, :, : out.shape[2]]
        return checksum(out)

    def write(self, host_block: int, data: Bytes) -> int:
        self.blocks[host_block][:, :, : data.shape[2]] = data
        return checksum(data)


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (1, 2), (2, 2), (4, 1)])
def test_parts_of_ranks_make_whole_blocks(tp_size: int, pp_size: int, model: Path) -> None:
    whole = describe_model(model)
    shape = KvLayout(
        num_layers=whole.num_layers, num_kv_heads=whole.num_kv_heads, head_bytes=8, dtype="x", block_size=4
    ).shape(4)
    blocks = np.random.default_rng(1).integers(0, 256, (3, *shape), dtype=np.uint8)
    shards = [Shard.of_rank(rank, tp_size, pp_size) for rank in range(tp_size * pp_size)]
    pairs = [socket.socketpair() for _ in shards[1:]]
    parts = list(parts_of(whole, whole.num_layers, shards, [None, *(ours for ours, _ in pairs)]))
    memories = []
    for shard, part in zip(shards, parts, strict=True):
        d = local_description(whole, shard)
        cut = np.stack([part.of(block) for block in blocks])
        memories.append(
            PartMemory(
                cut,
                KvLayout(num_layers=d.num_layers, num_kv_heads=d.num_kv_heads, head_bytes=8, dtype="x", block_size=4),
            )
        )
        assert cut.shape[1:] == memories[-1].layout.shape(4)
    threads = [
        threading.Thread(target=serve_blocks, args=(memory, theirs))
        for memory, (_, theirs) in zip(memories[1:], pairs, strict=True)
    ]
    for thread in threads:
        thread.start()
    memory = RankMemory(memories[0], parts, whole.num_layers, whole.num_kv_heads)
    try:
        for num_tokens in (4, 3):
            out = np.empty(memory.layout.shape(num_tokens), dtype=np.uint8)
            memory.read(2, out)
            np.testing.assert_array_equal(out, blocks[2][:, :, :num_tokens])
            memory.write(0, out)
        expected = blocks[2].copy()
        for own, part in zip(memories, parts, strict=True):
            np.testing.assert_array_equal(own.blocks[0], part.of(expected))
    finally:
        for ours, _ in pairs:
            ours.close()
        for thread in threads:
            thread.join()
        for _, theirs in pairs:
            theirs.close()
    if pairs:
        with pytest.raises(OSError):
            memory.read(0, np.empty(memory.layout.shape(4), dtype=np.uint8))


@pytest.fixture(scope="module")
def alone(model: Path) -> Iterator[list[int]]:
    with started(model, **TORCH) as running:
        running.add("x", None)
        yield run(running, until=(running, "x"))


@pytest.mark.parametrize(
    ("sender", "receiver"),
    [
        ({"tensor_parallel_size": 2}, {}),
        ({}, {"tensor_parallel_size": 2}),
        ({}, {"pipeline_parallel_size": 2}),
    ],
)
def test_engines_that_are_divided_differently_exchange_kv(
    sender: dict[str, Any], receiver: dict[str, Any], model: Path, alone: list[int]
) -> None:
    with (
        started(model, "prefill", **TORCH, **sender) as prefill,
        started(model, "decode", **TORCH, **receiver) as decode,
    ):
        assert exchanged(prefill, decode) == alone


@pytest.mark.parametrize("sender", [{"tensor_parallel_size": 2}, {}])
def test_they_exchange_what_a_window_sees(sender: dict[str, Any], tmp_path: Path) -> None:
    """Blocks behind windows are freed: a block has the layers of one group."""
    directory = make_model(tmp_path, "gemma3_text", num_hidden_layers=4, layer_types=[*WINDOWED * 3, "full_attention"])
    receiver = {} if sender else {"tensor_parallel_size": 2}
    with started(directory, **TORCH) as running:
        running.add("x", None)
        expected = run(running, until=(running, "x"))
    with (
        started(directory, "prefill", **TORCH, **sender) as prefill,
        started(directory, "decode", **TORCH, **receiver) as decode,
    ):
        assert decode.engine.facts.num_windowed_groups == 3
        decode.add("x", prefill.compute_prompt("x"))
        assert run(prefill, decode, until=(decode, "x")) == expected
        # Whole blocks of it, and the columns after them.
        assert decode.engine.counters().kv_loaded_tokens > len(PROMPT) // 2


def exchanged(prefill: Running, decode: Running) -> list[int]:
    decode.add("x", prefill.compute_prompt("x"))
    tokens = run(prefill, decode, until=(decode, "x"))
    assert decode.engine.counters().kv_loaded_tokens == len(PROMPT) - 1
    return tokens
