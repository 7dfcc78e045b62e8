"""Divides the decoding sequences of a step between clients: one client's many sequences must not slow down the others'.

A step takes longer the more sequences it has, so a client with 128 sequences makes the tokens of another client, who
has two, come several times later. Where that is so, the sequences of the client with many take turns. With k clients,
a step takes at most k times as long as it would with the sequences of the client with fewest alone: then each client
has at least the part of the engine's time that it would have if the engine were divided in time between the clients. A
sequence that joins counts too, so that its first token does not wait for all sequences of another client.

How many sequences that allows follows from measured times (`step_times`): on a GPU, where a hundred more sequences cost
hardly anything, all may take part. Without clients, or with sequences of a single client, nobody waits. Used only by
`lanes.running`.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable
from operator import attrgetter

from antiphon.services.engine.core.policy.prefill_shares import divide
from antiphon.services.engine.core.policy.step_times import StepTimes
from antiphon.services.engine.core.sequence import Sequence

_AGE = attrgetter("age")


class DecodeTurns:
    """Whose turn it is among the sequences of each client that has too many."""

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._last: dict[str, tuple[int, int, int]] = {}
        """The age of the last sequence that used its turn, by client; only of clients whose sequences take turns."""
        self._offered: dict[str, list[Sequence]] = {}
        """The sequences that have a turn in the step that is being planned, by client."""

    def resting(self, running: Iterable[Sequence], joining: Sequence | None, now_s: float) -> frozenset[int]:
        """Returns the rows of the decoding sequences that the next step leaves out.

        `running`: those that are not idle, oldest first. `joining`: a sequence of a client that has none of these, and
        that may join. `now_s`: 0 if there is no clock, and then no sequence is left out. `used` must follow.
        """
        self._offered = {}
        lines: dict[str, list[Sequence]] = {}
        for sequence in running:
            if sequence.num_unscheduled_tokens == 1 and not sequence.canary:
                lines.setdefault(sequence.client, []).append(sequence)
        counts = {client: len(line) for client, line in lines.items()}
        if joining is not None:
            counts.setdefault(joining.client, 1)
        room = self._room(counts.values()) if now_s and len(counts) > 1 else None
        if room is None:
            self._last.clear()
            return frozenset()
        shares, rests = divide(room, counts), set[int]()
        for client, line in lines.items():
            if (share := shares[client]) < len(line):
                begin = bisect_right(line, self._last[client], key=_AGE) if client in self._last else 0
                turns = line[begin : begin + share] + line[: max(0, begin + share - len(line))]
                self._offered[client] = turns
                rests |= {one.row for one in line}.difference(one.row for one in turns)
        self._last = {client: age for client, age in self._last.items() if client in self._offered}
        return frozenset(rests)

    def used(self, rows: Collection[int]) -> None:
        """Records which rows are in the planned step. A sequence that blocks ran out for keeps its turn."""
        for client, turns in self._offered.items():
            if ages := [one.age for one in turns if one.row in rows]:
                self._last[client] = ages[-1]

    def _room(self, counts: Collection[int]) -> int | None:
        """Returns how many sequences a step may have; None if all of them may take part.

        `counts`: how many each client has. While too little is known about times, half of the sequences take part: that
        shows what the others cost.
        """
        fewest, num_clients = min(counts), len(counts)
        fixed = self._times.fixed_rows()
        room = sum(counts) / 2 if fixed is None else (num_clients - 1) * fixed
        room = max(room, num_clients * fewest) if fixed is None else room + num_clients * fewest
        return int(room) if room < sum(counts) else None
