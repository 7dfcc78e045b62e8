"""The sequences that this gateway has moved most recently from draining engines, for the admin endpoints."""

from collections import OrderedDict
from dataclasses import dataclass

MOVES_MAX = 1000


@dataclass(slots=True)
class Move:
    """One sequence that left a working engine. `position`: number of its output tokens at that time.

    `to`: the new engine; empty while it waits.
    """

    sequence_id: str
    engine: str
    position: int
    to: str = ""


class Moves:
    """The latest move of each of the last `MOVES_MAX` moved sequences."""

    def __init__(self) -> None:
        self._moves: OrderedDict[str, Move] = OrderedDict()

    def left(self, sequence_id: str, engine: str, position: int) -> None:
        """Records that a sequence leaves an engine."""
        self._moves.pop(sequence_id, None)
        self._moves[sequence_id] = Move(sequence_id, engine, position)
        while len(self._moves) > MOVES_MAX:
            self._moves.popitem(last=False)

    def placed(self, sequence_id: str, engine: str) -> None:
        """Records the new engine of a moved sequence that waits for a placement."""
        move = self._moves.get(sequence_id)
        if move is not None and not move.to:
            move.to = engine

    def of(self, engine: str) -> list[Move]:
        """Returns the sequences that have left an engine since the last `forget`, the earliest first."""
        return [move for move in self._moves.values() if move.engine == engine]

    def forget(self, engine: str) -> None:
        """Drops the moves away from an engine."""
        for move in self.of(engine):
            del self._moves[move.sequence_id]
