"""CUDA graphs of decode steps: one launch computes everything from token ids to logits.

Graphs are captured for some numbers of sequences; a step with fewer sequences runs in the next larger graph, padded.
All graphs share one memory pool, so the largest is captured first, and all write their logits to the same buffer. Steps
with prompts, or with more long sequences than a graph has room for, run without a graph. Called by the GPU worker.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from antiphon.services.engine.backends.triton.device_inputs import DeviceStep, GraphSize, HostStep
from antiphon.services.engine.backends.triton.kernels.attention.attention_work import Integers
from antiphon.services.engine.kernels.splits import splits_of
from antiphon.services.engine.parallel.communicator import Communicator

logger = logging.getLogger(__name__)


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Returns 1, 2, 4, then multiples of 8 up to 256 and of 16 beyond, up to `max_num_seqs`, and that number itself."""
    sizes = {1, 2, 4, *range(8, 257, 8), *range(272, max_num_seqs + 1, 16), max_num_seqs}
    return sorted(size for size in sizes if size <= max_num_seqs)


Capture = Callable[[Callable[[], object], Any], tuple[Callable[[], None], Any]]
"""Captures what a function launches, in a pool of memory or, if that is None, in one of its own.

Returns what launches it again, and the pool.
"""


def captured(compute: Callable[[], object], pool: Any) -> tuple[Callable[[], None], Any]:
    """Captures a CUDA graph, see `Capture`."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Of this thread only: with several ranks, one of PyTorch's threads asks for NCCL's events at any time.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        compute()
    return graph.replay, graph.pool() if pool is None else pool


def captured_by_all(ranks: Communicator, capture: Capture = captured) -> Capture:
    """Returns the `Capture` of one of several ranks: if a rank fails, all raise RuntimeError.

    Else the others would wait, in the next step, for a rank that has ended.
    """

    def by_all(compute: Callable[[], object], pool: Any) -> tuple[Callable[[], None], Any]:
        found, failure = None, None
        try:
            found = capture(compute, pool)
        except Exception as error:  # whatever it is, the other ranks are told first
            failure = error
        all_have = ranks.smallest(int(found is not None))
        if found is None or not all_have:
            raise RuntimeError("a graph of the decode steps was not captured on every rank") from failure
        return found

    return by_all


class DecodeGraphs:
    """The captured graphs, one for each of `sizes`, in ascending order of their sequences.

    `split_tokens`: keys of a split of each kind of layers. `prepare(size)` stages an empty step, at the same device
    addresses as all later steps of that size. `compute` returns the logits of a step.
    """

    def __init__(
        self,
        sizes: Sequence[GraphSize],
        split_tokens: Sequence[int],
        prepare: Callable[[GraphSize], DeviceStep],
        compute: Callable[[DeviceStep], Tensor],
        capture: Capture = captured,
    ) -> None:
        self._sizes, self._split_tokens = sizes, split_tokens
        self._replays: dict[int, Callable[[], None]] = {}
        self._logits: Tensor | None = None
        started = time.monotonic()
        pool: Any = None
        for size in reversed(sizes):
            # Run once before capture, because compilation and the libraries' first calls cannot be captured.
            step = prepare(size)
            logits = compute(step)
            if self._logits is None:
                self._logits = torch.empty_like(logits)
            kept = self._logits[: size.num_seqs]
            replay, pool = capture(lambda kept=kept, step=step: kept.copy_(compute(step)), pool)
            self._replays[size.num_seqs] = replay
        logger.info("captured %d graphs in %.1f s", len(sizes), time.monotonic() - started)

    def find(self, seq_lens: Integers) -> GraphSize | None:
        """Returns the size of the smallest graph for sequences of these lengths in tokens [S]; None if none fits."""
        place = bisect_left(self._sizes, len(seq_lens), key=lambda size: size.num_seqs)
        items = [(each, int(splits_of(seq_lens, each).sum())) for each in self._split_tokens]
        fitting = (s for s in self._sizes[place:] if all(count <= s.max_items(each) for each, count in items))
        return next(fitting, None)

    def replay(self, size: GraphSize) -> Tensor:
        """Runs a graph. Returns logits [num_seqs of the graph, vocab], which the next replay overwrites."""
        assert self._logits is not None, "no graph was captured"
        self._replays[size.num_seqs]()
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
        return graphs.find(step.sequences.seq_lens)

    def replay(self, size: GraphSize) -> Tensor:
        """See `DecodeGraphs.replay`."""
        graphs = self.adapted if size.num_slots else self.plain
        assert graphs is not None, "no graph was captured"
        return graphs.replay(size)
