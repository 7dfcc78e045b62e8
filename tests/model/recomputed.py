"""Graphs for tests without a device."""

from collections.abc import Callable

from antiphon.services.engine.backends.triton.worker import TritonWorker
from antiphon.services.engine.worker.capacity.graphs import GraphBounds, Reach


class Recomputed:
    """Graphs without a device: what was captured is computed again, from the places where it was captured."""

    def __init__(self) -> None:
        self.num_captured = 0
        self.replayed: list[int] = []
        """For each replay, the number of the graph, in the order of their capture: mixed ones first, the largest first.
        """

    def __call__(self, compute: Callable[[], object]) -> Callable[[], None]:
        number = self.num_captured
        self.num_captured += 1
        compute()

        def replay() -> None:
            self.replayed.append(number)
            compute()

        return replay


def graphs_of(
    worker: TritonWorker, *, usual: int = 2**20, num_tokens: int = 1, max_queries: int = 1, num_slots: int = 0
) -> GraphBounds:
    """Returns bounds for a worker's graphs: decode graphs, and mixed ones for up to `num_tokens` tokens."""
    longest, num_seqs = worker.facts().max_model_len, worker._tables.shape[1]
    return GraphBounds(
        num_seqs=num_seqs,
        num_tokens=num_tokens,
        max_queries=max_queries,
        reach=Reach(min(usual, longest), longest),
        num_slots=num_slots,
    )
