"""CUDA graphs of steps: one launch computes everything from token ids to logits, or to hidden states.

Graphs are captured for some numbers of tokens; a step with fewer runs in the next larger graph, padded. All graphs
share one memory pool, so the largest is captured first, and the graphs of a kind write to the same buffer. Steps with
more tokens, or with more long sequences, than a graph has room for run without a graph. Called by the GPU worker.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from antiphon.services.engine.backends.triton.device_inputs import DeviceStep, HostStep
from antiphon.services.engine.backends.triton.graph_sizes import GraphSize, decode_sizes, mixed_sizes
from antiphon.services.engine.backends.triton.kernels.attention.attention_work import Heads
from antiphon.services.engine.parallel.communicator import Communicator
from antiphon.services.engine.worker.capacity.graphs import GraphBounds

logger = logging.getLogger(__name__)

Prepare = Callable[[GraphSize], DeviceStep]
"""Stages an empty step, at the same device addresses as all later steps of a size."""
Compute = Callable[[DeviceStep], Tensor]
Capture = Callable[[Callable[[], object]], Callable[[], None]]
"""Captures what a function launches. Returns what launches it again."""


class CudaCapture:
    """Captures CUDA graphs, in one pool of memory; see `Capture`. At most one of them may run at a time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, compute: Callable[[], object]) -> Callable[[], None]:
        """See `Capture`."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Of this thread only: with several ranks, one of PyTorch's threads asks for NCCL's events at any time.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            compute()
        self._pool = graph.pool()
        return graph.replay


def captured_by_all(ranks: Communicator, capture: Capture | None = None) -> Capture:
    """Returns the `Capture` of one of several ranks: if a rank fails, all raise RuntimeError.

    Else the others would wait, in the next step, for a rank that has ended.
    """
    capture = capture or CudaCapture()

    def by_all(compute: Callable[[], object]) -> Callable[[], None]:
        replay, failure = None, None
        try:
            replay = capture(compute)
        except Exception as error:  # whatever it is, the other ranks are told first
            failure = error
        all_have = ranks.smallest(int(replay is not None))
        if replay is None or not all_have:
            raise RuntimeError("a graph of the steps was not captured on every rank") from failure
        return replay

    return by_all


class Graphs:
    """The captured graphs of a kind, one for each of `sizes`, in ascending order of their tokens."""

    def __init__(self, sizes: Sequence[GraphSize], prepare: Prepare, compute: Compute, capture: Capture) -> None:
        """`compute` returns the output [tokens, width] of a step."""
        self._sizes = sizes
        self._replays: dict[int, Callable[[], None]] = {}
        self._outputs: Tensor | None = None
        for size in reversed(sizes):
            # Run once before capture, because compilation and the libraries' first calls cannot be captured.
            step = prepare(size)
            outputs = compute(step)
            if self._outputs is None:
                self._outputs = torch.empty_like(outputs)
            kept = self._outputs[: size.num_tokens]
            self._replays[size.num_tokens] = capture(lambda kept=kept, step=step: kept.copy_(compute(step)))

    def find(self, step: HostStep, kinds: Iterable[Heads]) -> GraphSize | None:
        """Returns the size of the smallest graph for a step; None if none fits. `kinds`: heads of the layers."""
        place = bisect_left(self._sizes, len(step.ids), key=lambda size: size.num_tokens)
        return next((size for size in self._sizes[place:] if size.fits(step.sequences, kinds)), None)

    def replay(self, size: GraphSize) -> Tensor:
        """Runs a graph. Returns outputs [num_tokens of the graph, width], which the next replay overwrites."""
        assert self._outputs is not None, "no graph was captured"
        self._replays[size.num_tokens]()
        return self._outputs[: size.num_tokens]


class StepGraphs:
    """The graphs of all kinds of steps.

    Graphs with products of adapters are separate, so that steps without adapters do not compute them.
    """

    def __init__(
        self,
        bounds: GraphBounds,
        kinds: Iterable[Heads],
        prepare: Prepare,
        logits: Compute,
        hidden: Compute,
        capture: Capture,
    ) -> None:
        """`logits`, `hidden`: compute those of all tokens of a step."""
        self._kinds, started = frozenset(kinds), time.monotonic()
        # Mixed graphs first: the largest one has the most tokens of all.
        every = (0, bounds.num_slots) if bounds.num_slots else (0,)
        self._mixed = {slots: Graphs(mixed_sizes(bounds, slots), prepare, hidden, capture) for slots in every}
        self._decode = {slots: Graphs(decode_sizes(bounds, slots), prepare, logits, capture) for slots in every}
        self._num_slots = bounds.num_slots
        count = len(every) * (len(bounds.decode) + len(bounds.mixed))
        logger.info("captured %d graphs in %.1f s", count, time.monotonic() - started)

    def find(self, step: HostStep) -> GraphSize | None:
        """Returns the size of the graph for a step; None if none fits."""
        if step.is_eager:
            return None
        slots = 0 if step.token_slots is None else self._num_slots
        found = self._decode[slots].find(step, self._kinds) if step.is_decode else None
        return found or self._mixed[slots].find(step, self._kinds)

    def replay(self, size: GraphSize) -> Tensor:
        """Runs a graph. Returns logits or hidden states (`GraphSize.is_decode`), see `Graphs.replay`."""
        return (self._decode if size.is_decode else self._mixed)[size.num_slots].replay(size)
