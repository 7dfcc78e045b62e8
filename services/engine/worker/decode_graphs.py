"""CUDA graphs of decode steps: for some numbers of sequences, everything from token ids to logits as one launch.

A step with fewer sequences runs in the next larger graph, its free places without a sequence. All graphs share their
memory, so the largest is captured first, and leave their logits in one place. Sequences longer than graphs cover, and
steps with prompts, run without.
Called by the GPU worker.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from services.engine.worker.device_inputs import DeviceStep, GraphSize

logger = logging.getLogger(__name__)

_GRAPHS_BYTES = 512 * 2**20
"""Activations of the largest graph, and the driver's own memory."""


def graphs_bytes(max_num_seqs: int, vocab_size: int) -> int:
    """What captured graphs keep: the logits of the largest one are there twice, in its own memory and for everybody."""
    return _GRAPHS_BYTES + 2 * 4 * max_num_seqs * vocab_size


def graph_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, then every 8 up to 256 and every 16 beyond, as far as sequences may run, and that number itself."""
    sizes = {1, 2, 4, *range(8, 257, 8), *range(272, max_num_seqs + 1, 16), max_num_seqs}
    return sorted(size for size in sizes if size <= max_num_seqs)


class DecodeGraphs:
    """`prepare(size)` puts an empty step where later ones of that size are put; `compute` gives its logits."""

    def __init__(
        self,
        sizes: list[int],
        max_seq_len: int,
        prepare: Callable[[GraphSize], DeviceStep],
        compute: Callable[[DeviceStep], Tensor],
    ) -> None:
        self._sizes, self._max_seq_len = sizes, max_seq_len
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._logits: Tensor | None = None
        started = time.monotonic()
        pool: Any = None
        for size in reversed(sizes):
            # Once without: compiling and the library's first calls cannot be captured.
            step = prepare(GraphSize(size, max_seq_len))
            logits = compute(step)
            if self._logits is None:
                self._logits = torch.empty_like(logits)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._logits[:size].copy_(compute(step))
            pool = graph.pool() if pool is None else pool
            self._graphs[size] = graph
        logger.info("captured %d CUDA graphs in %.1f s", len(sizes), time.monotonic() - started)

    def find(self, num_seqs: int, longest: int) -> GraphSize | None:
        """The graph for so many sequences; None: run without."""
        place = bisect_left(self._sizes, num_seqs)
        if place == len(self._sizes) or longest > self._max_seq_len:
            return None
        return GraphSize(self._sizes[place], self._max_seq_len)

    def replay(self, size: GraphSize) -> Tensor:
        """Logits [num_seqs of the graph, vocab]; the next replay overwrites them."""
        assert self._logits is not None, "no graph was captured"
        self._graphs[size.num_seqs].replay()
        return self._logits[: size.num_seqs]
