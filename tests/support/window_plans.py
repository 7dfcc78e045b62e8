"""Plans made by hand, with blocks for each group of layers: what a window has passed goes to another sequence at once.

The blocks of a sequence are scattered, those of a window that are given back are the next to be taken, also by another
sequence of the same step. With facts of a worker without further groups the plans are the same without their blocks.
"""

import random
from dataclasses import dataclass, field

from antiphon.services.engine.core.plan import EngineFacts, NewSequence, ScheduledSequence, StepPlan, StepResult
from antiphon.shared.parameters.sampling import SamplingParams

Column = tuple[int, ...]
"""The blocks that hold the same tokens, one of each further group."""


@dataclass
class PlannedSequence:
    """A sequence as a scheduler knows it."""

    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    columns: list[Column] = field(default_factory=list)
    """Those after `num_passed`."""
    num_passed: int = 0
    joined: bool = False

    @property
    def num_missing(self) -> int:
        return len(self.token_ids) - self.num_computed


@dataclass(frozen=True)
class Share:
    """What a sequence does in a step: its next tokens, or with drafts its last one and the drafts."""

    row: int
    num_tokens: int = 1
    drafts: tuple[int, ...] = ()


class WindowPlans:
    """A scheduler of few words: a test says who computes how much, this finds the blocks."""

    def __init__(self, facts: EngineFacts, seed: int = 0) -> None:
        self._size, self._groups, self._window = facts.block_size, facts.num_windowed_groups, facts.window
        self._free = list(range(facts.num_blocks))
        random.Random(seed).shuffle(self._free)
        self._passed: dict[int, int] = {}
        """For each block of a window that was given back, whose it was."""
        self.num_reused = 0
        """How many of them another sequence got."""
        self.rows: dict[int, PlannedSequence] = {}
        self._step, self._freed_rows, self._moved = 0, list[int](), list[tuple[tuple[int, int], tuple[int, int]]]()
        self._sampling: list[int] = []

    def add(self, row: int, prompt: list[int], params: SamplingParams) -> None:
        self.rows[row] = PlannedSequence(list(prompt), len(prompt), params)

    def end(self, row: int) -> PlannedSequence:
        """The sequence leaves, and its blocks are free; it is given back."""
        sequence = self.rows.pop(row)
        self._freed_rows.append(row)
        self._free += sequence.blocks + [block for column in sequence.columns for block in column]
        return sequence

    def move(self, row: int, other: int) -> None:
        """The sequence goes through the host's memory to another row, and to other blocks."""
        self._pass(row, self.rows[row])
        sequence = self.end(row)
        places = iter(range(len(sequence.blocks) + len(sequence.columns) * self._groups))

        def moved(block: int) -> int:
            host, new = next(places), self._take(other)
            self._moved.append(((block, host), (host, new)))
            return new

        sequence.blocks = [moved(block) for block in sequence.blocks]
        sequence.columns = [tuple(map(moved, column)) for column in sequence.columns]
        sequence.joined = False
        self.rows[other] = sequence

    def plan(self, *shares: Share) -> StepPlan:
        """The next step. Its result goes to `take`, before the plan after it is made."""
        for share in shares:
            self._pass(share.row, self.rows[share.row])
        new, scheduled = list[NewSequence](), list[ScheduledSequence]()
        for share in shares:
            sequence, joins = self.rows[share.row], not self.rows[share.row].joined
            blocks, columns = self._more(share, sequence)
            if joins:
                sequence.joined = True
                new.append(self._joining(share.row, sequence))
            scheduled.append(
                ScheduledSequence(
                    row=share.row,
                    start=sequence.num_computed,
                    num_tokens=share.num_tokens,
                    samples=share.num_tokens - len(share.drafts) == sequence.num_missing,
                    new_block_ids=() if joins else blocks,
                    new_window_ids=() if joins else _joined(columns),
                    draft_token_ids=share.drafts,
                )
            )
        self._step += 1
        plan = StepPlan(
            step=self._step,
            freed_rows=tuple(self._freed_rows),
            new=tuple(new),
            scheduled=tuple(scheduled),
            swap_out=tuple(pair for pair, _ in self._moved),
            swap_in=tuple(pair for _, pair in self._moved),
            num_tokens=sum(share.num_tokens for share in shares),
        )
        self._freed_rows, self._moved = [], []
        return plan

    def take(self, plan: StepPlan, result: StepResult) -> None:
        """The sampled tokens follow the known ones."""
        tokens = iter(result.token_ids)
        for share in plan.scheduled:
            sequence = self.rows[share.row]
            if share.samples:
                sequence.token_ids += next(tokens)
                sequence.num_computed = len(sequence.token_ids) - 1
            else:
                sequence.num_computed += share.num_tokens

    def _joining(self, row: int, sequence: PlannedSequence) -> NewSequence:
        return NewSequence(
            row=row,
            sequence_id=f"{self._step}-{row}",
            token_ids=tuple(sequence.token_ids),
            num_prompt_tokens=sequence.num_prompt_tokens,
            block_ids=tuple(sequence.blocks),
            window_ids=_joined(sequence.columns),
            params=sequence.params,
        )

    def _more(self, share: Share, sequence: PlannedSequence) -> tuple[tuple[int, ...], list[Column]]:
        """The sequence's further blocks for a step, which it gets."""
        count = -(-(sequence.num_computed + share.num_tokens) // self._size) - len(sequence.blocks)
        blocks = tuple(self._take(share.row) for _ in range(count))
        columns = [tuple(self._take(share.row) for _ in range(self._groups)) for _ in blocks]
        sequence.blocks += blocks
        sequence.columns += columns
        return blocks, columns

    def _take(self, row: int) -> int:
        block = self._free.pop()
        self.num_reused += self._passed.pop(block, row) != row
        return block

    def _pass(self, row: int, sequence: PlannedSequence) -> None:
        """Gives back the blocks that no later query of the sequence sees."""
        first = max(0, sequence.num_computed - self._window + 1) // self._size
        while self._groups and sequence.num_passed < first:
            column = sequence.columns.pop(0)
            sequence.num_passed += 1
            self._free += column
            self._passed.update(dict.fromkeys(column, row))


def _joined(columns: list[Column]) -> tuple[int, ...]:
    return tuple(block for column in columns for block in column)
