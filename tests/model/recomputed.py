"""Graphs for tests without a device."""

from collections.abc import Callable


class Recomputed:
    """Graphs without a device: what was captured is computed again, from the places where it was captured."""

    def __init__(self) -> None:
        self.num_captured = 0
        self.replayed: list[int] = []
        """For each replay, the number of the graph, in the order of their capture."""

    def __call__(self, compute: Callable[[], object], pool: object) -> tuple[Callable[[], None], object]:
        number = self.num_captured
        self.num_captured += 1
        compute()

        def replay() -> None:
            self.replayed.append(number)
            compute()

        return replay, pool
