"""Speed of KV between two engines: over TCP and through shared memory, beside a plain stream and a plain copy.

    python -m bench.kv_transfer [--rounds 7] [--blocks 64] [--cache panels] [--numpy] [--json FILE]

Two processes have the connectors of engines (`antiphon.services.engine.kv`) and the caches of CPU workers, in the shape
of a model with 8 billion parameters: of the C++ backend (`panels`), or of PyTorch's operations and of GPUs (`rows`).
The blocks are copied by the C++ library or by numpy. In each round the same bytes are moved in four ways, one after the
other: copied in one process; streamed over a plain TCP connection; fetched by the connector over TCP; fetched through
shared memory. Prints the median speed of each way, and for the connector the share that it reaches of the corresponding
plain way's speed in the same round. Also prints the processor time of both processes, which other programs on the
machine disturb less. Part of `make bench`.
"""

import argparse
import multiprocessing
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from antiphon.services.engine.backends.cpu.kv_memory import PanelMemory
from antiphon.services.engine.backends.cpu.library import load_library
from antiphon.services.engine.core.kv.kv_transfer import KvLoad, KvLoaded, KvMeta, KvSave
from antiphon.services.engine.kv.connector import KvConnector
from antiphon.services.engine.kv.layout import KvMemory
from antiphon.services.engine.models.families import llama
from antiphon.services.engine.worker.capacity.kv_cache import KvCache
from antiphon.services.engine.worker.capacity.kv_memory import CacheMemory, blocks_of
from antiphon.shared import limits
from bench.harness.output import save
from bench.limits_of_machine import machine

LAYERS, HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
WAYS = {"plain copy": "", "plain TCP": "", "KV over TCP": "plain TCP", "KV shared": "plain copy"}
"""The ways to move the bytes. A way of the product has the plain way that it is compared with, a plain way has ''."""
HOST, WAIT_S = "127.0.0.1", 60.0


MODEL = {
    "vocab_size": 32_000,
    "hidden_size": HEADS * HEAD_DIM,
    "intermediate_size": 4 * HEADS * HEAD_DIM,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_DIM,
    "torch_dtype": "bfloat16",
}


def cache(num_blocks: int, seed: int) -> KvCache:
    """Returns a cache of random bytes."""
    torch.manual_seed(seed)
    shape = (num_blocks, BLOCK_SIZE, HEADS, HEAD_DIM)
    make = lambda: torch.randint(0, 2**15, shape, dtype=torch.int16).view(torch.bfloat16)  # noqa: E731
    return KvCache(tuple(make() for _ in range(LAYERS)), tuple(make() for _ in range(LAYERS)))


def memory(kind: str, device: KvCache, host: KvCache, *, native: bool) -> KvMemory:
    """Returns a worker's memory with these caches, whose blocks the C++ library or numpy copies."""
    copy = load_library().copy_block if native else None
    if kind == "panels":
        return PanelMemory(device, host, llama.describe(MODEL), torch.bfloat16, copy)
    return CacheMemory(device, blocks_of(host, copy), copy)


def names(num_blocks: int) -> tuple[bytes, ...]:
    """Returns the names (hashes) of the blocks, the same in every transfer."""
    return tuple(number.to_bytes(16, "little") for number in range(num_blocks))


def sender(pipe: Connection, num_blocks: int, kind: str, native: bool) -> None:
    """The prefill engine's side: at each message of the pipe prepares a transfer or streams plain bytes; ends at ''."""
    torch.set_num_threads(1)
    blocks = memory(kind, cache(num_blocks, 1), cache(1, 2), native=native)
    connector = KvConnector(blocks, lambda: None, host=HOST)
    listener = socket.create_server((HOST, 0))
    pipe.send((connector.address, listener.getsockname()[1]))
    while transfer := pipe.recv():
        if transfer == "cpu":
            pipe.send(time.process_time())
        elif transfer == "plain":
            data = memoryview(np.ones(block_bytes(), dtype=np.uint8))  # pyright: ignore[reportArgumentType]
            with listener.accept()[0] as sock:
                for _ in range(num_blocks):
                    sock.sendall(data)
        else:
            save = KvSave(
                transfer_id=transfer,
                hashes=names(num_blocks),
                block_ids=tuple(range(num_blocks)),
                num_tokens_in_last=BLOCK_SIZE,
                complete=True,
            )
            connector.start_load(KvMeta(opened=(transfer,), saves=(save,)))
            pipe.send(None)
    connector.close()
    listener.close()


def block_bytes() -> int:
    """Returns the size of a block."""
    return LAYERS * 2 * BLOCK_SIZE * HEADS * HEAD_DIM * 2


class Receiver:
    """The decode engine's side, in this process."""

    def __init__(self, pipe: Connection, num_blocks: int, kind: str, *, native: bool) -> None:
        self._pipe, self._num_blocks, self._count = pipe, num_blocks, 0
        self._address, self._port = pipe.recv()
        blocks = memory(kind, cache(1, 3), cache(num_blocks, 4), native=native)
        self._ended = threading.Event()
        self._connector = KvConnector(blocks, self._ended.set)
        self._source = np.ones((num_blocks, block_bytes()), dtype=np.uint8)
        self._target = np.zeros_like(self._source)
        self.ways: dict[str, Callable[[], float]] = {
            "plain copy": self.copy,
            "plain TCP": self.stream,
            "KV over TCP": lambda: self.fetch(0),
            "KV shared": lambda: self.fetch(limits.KV_SHARED_BYTES_MAX),
        }

    def copy(self) -> float:
        """Returns the seconds of a copy within this process."""
        begun = time.perf_counter()
        for index in range(self._num_blocks):
            self._target[index] = self._source[index]
        return time.perf_counter() - begun

    def stream(self) -> float:
        """Returns the seconds until all bytes of a plain connection are here."""
        self._pipe.send("plain")
        begun = time.perf_counter()
        with socket.create_connection((HOST, self._port)) as sock:
            for index in range(self._num_blocks):
                rest = self._target[index].data
                while rest:
                    rest = rest[sock.recv_into(rest) :]
        return time.perf_counter() - begun

    def fetch(self, shared_bytes_max: int) -> float:
        """Returns the seconds from the order to the end of a transfer. With 0 bytes it goes over TCP."""
        self._count += 1
        self._ended.clear()
        transfer, usual = f"t{self._count}", limits.KV_SHARED_BYTES_MAX
        self._pipe.send(transfer)
        self._pipe.recv()
        limits.KV_SHARED_BYTES_MAX = shared_bytes_max
        try:
            begun = time.perf_counter()
            blocks, tokens = tuple(range(self._num_blocks)), self._num_blocks * BLOCK_SIZE
            load = KvLoad(
                transfer_id=transfer,
                address=self._address,
                hashes=names(self._num_blocks),
                host_blocks=blocks,
                num_tokens=tokens,
            )
            self._connector.start_load(KvMeta(loads=(load,)))
            assert self._ended.wait(WAIT_S), "the transfer has not ended"
            found = self._connector.finished()
            assert found == [KvLoaded(transfer, self._num_blocks)], found
            return time.perf_counter() - begun
        finally:
            limits.KV_SHARED_BYTES_MAX = usual

    def cpu_s(self) -> float:
        """Returns the processor seconds of both processes so far."""
        self._pipe.send("cpu")
        return self._pipe.recv() + time.process_time()

    def close(self) -> None:
        """Ends both sides."""
        self._pipe.send("")
        self._connector.close()


def measure(rounds: int = 7, num_blocks: int = 64, kind: str = "panels", *, native: bool = True) -> dict[str, Any]:
    """Runs all rounds. Returns for each way the median GB/s, and for those of the product the result of `shares`."""
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    other = context.Process(target=sender, args=(far, num_blocks, kind, native))
    other.start()
    far.close()  # so that the end of the other process ends the wait for its answers
    receiver = Receiver(near, num_blocks, kind, native=native)
    size = num_blocks * block_bytes()
    try:
        for way in receiver.ways.values():
            way()
        found, cpu = {name: list[float]() for name in WAYS}, {name: list[float]() for name in WAYS}
        for _ in range(rounds):
            for name, way in receiver.ways.items():
                before = receiver.cpu_s()
                found[name].append(size / way() / 1e9)
                cpu[name].append((receiver.cpu_s() - before) / size * 1e9)
    finally:
        receiver.close()
        other.join(WAIT_S)
    medians = {name: round(statistics.median(rates), 2) for name, rates in found.items()}
    spent = {name: round(statistics.median(times), 3) for name, times in cpu.items()}
    return {
        "megabytes": round(size / 1e6),
        "rounds": rounds,
        "cache": kind,
        "copied_by": "library" if native else "numpy",
        "gb_per_s": medians,
        "share_of_plain": shares(found),
        "cpu_s_per_gb": spent,
    }


def shares(found: dict[str, list[float]]) -> dict[str, float]:
    """Returns for each way of the product its speed divided by that of its plain way: medians over the rounds."""
    return {
        name: round(statistics.median(a / b for a, b in zip(found[name], found[plain], strict=True)), 2)
        for name, plain in WAYS.items()
        if plain
    }


def text(results: dict[str, Any]) -> str:
    """Returns the results as lines for the terminal."""
    what = f"{results['megabytes']} MB, cache: {results['cache']}, copied by: {results['copied_by']}"
    lines = [f"KV between two engines, {what}, medians of {results['rounds']} rounds"]
    for name, rate in results["gb_per_s"].items():
        share = results["share_of_plain"].get(name)
        compared = "" if share is None else f"   {100 * share:.0f} % of {WAYS[name]}"
        cpu = results["cpu_s_per_gb"][name]
        lines.append(f"{name:<12} {rate:6.2f} GB/s  {cpu:6.3f} CPU s a GB{compared}")
    return "\n".join(lines)


def main() -> int:
    """Measures, prints and saves."""
    parser = argparse.ArgumentParser(description="Speed of KV between two engines of this machine.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--blocks", type=int, default=64, help="of 16 tokens, 2 MB each")
    parser.add_argument("--cache", choices=("panels", "rows"), default="panels", help="layout of the engines' caches")
    parser.add_argument("--numpy", action="store_true", help="as on a machine without the C++ library")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    found = measure(options.rounds, options.blocks, options.cache, native=not options.numpy)
    results = {"machine": machine.facts(), **found}
    print(text(results))
    save(results, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
