"""CUDA graphs of decode steps: one launch computes everything from token ids to logits.

Graphs are captured for some numbers of sequences; a step with fewer sequences runs in the next larger graph, padded.
All graphs share one memory pool, so the largest is captured first, and all write their logits to the same buffer. Steps
with prompts, or with sequences longer than `max_seq_len`, run without a graph. Called by the GPU worker.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from antiphon.services.engine.backends.triton.device_inputs import DeviceStep, GraphSize, HostStep

logger = logging.getLogger(__name__)


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Returns 1, 2, 4, then multiples of 8 up to 256 and of 16 beyond, up to `max_num_seqs`, and that number itself."""
    sizes = {1, 2, 4, *range(8, 257, 8), *range(272, max_num_seqs + 1, 16), max_num_seqs}
    return sorted(size for size in sizes if size <= max_num_seqs)


class DecodeGraphs:
    """The captured graphs, one for each size. `num_slots`: see `GraphSize`.

    `prepare(size)` stages an empty step, at the same device addresses as all later steps of that size. `compute`
    returns the logits of a step.
    """

    def __init__(
        self,
        sizes: list[int],
        max_seq_len: int,
        prepare: Callable[[GraphSize], DeviceStep],
        compute: Callable[[DeviceStep], Tensor],
        num_slots: int = 0,
    ) -> None:
        self._sizes, self._max_seq_len, self._num_slots = sizes, max_seq_len, num_slots
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._logits: Tensor | None = None
        started = time.monotonic()
        pool: Any = None
        for size in reversed(sizes):
            # Run once before capture, because compilation and the libraries' first calls cannot be captured.
            step = prepare(GraphSize(size, max_seq_len, num_slots))
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
        """Returns the size of the graph for `num_seqs` sequences of at most `longest` tokens; None if none fits."""
        place = bisect_left(self._sizes, num_seqs)
        if place == len(self._sizes) or longest > self._max_seq_len:
            return None
        return GraphSize(self._sizes[place], self._max_seq_len, self._num_slots)

    def replay(self, size: GraphSize) -> Tensor:
        """Runs a graph. Returns logits [num_seqs of the graph, vocab], which the next replay overwrites."""
        assert self._logits is not None, "no graph was captured"
        self._graphs[size.num_seqs].replay()
        return self._logits[: size.num_seqs]


@dataclass(frozen=True, slots=True)
class StepGraphs:
    """The graphs of steps without adapters, and those of steps with adapters.

    They are separate, so that steps without adapters do not compute LoRA products.
    """

    plain: DecodeGraphs
    adapted: DecodeGraphs | None

    def find(self, step: HostStep) -> GraphSize | None:
        """Returns the size of the graph for a step; None if none fits."""
        graphs = self.plain if step.token_slots is None else self.adapted
        if graphs is None or not step.is_decode:
            return None
        return graphs.find(len(step.ids), int(step.sequences.seq_lens.max()))

    def replay(self, size: GraphSize) -> Tensor:
        """See `DecodeGraphs.replay`."""
        graphs = self.adapted if size.num_slots else self.plain
        assert graphs is not None, "no graph was captured"
        return graphs.replay(size)
