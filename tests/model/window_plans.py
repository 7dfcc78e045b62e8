"""Plans as a scheduler makes them that frees the blocks behind a window at once and gives them to other sequences."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from antiphon.services.engine.core.plan import NewSequence, ScheduledSequence, StepPlan, StepResult
from antiphon.services.engine.worker.interface import ModelWorker
from antiphon.shared.parameters.sampling import SamplingParams

Share = int | Sequence[int]
"""What a sequence computes in a step: so many known tokens, or its last token and these draft tokens."""


@dataclass
class _Running:
    row: int
    token_ids: list[int]
    num_prompt_tokens: int
    tables: list[list[int]]
    """For each group of layers the blocks of the sequence, of which the first `num_passed` may be others' by now."""
    num_computed: int = 0
    num_passed: int = 0
    joins: bool = True
    """Whether the next plan has it among its new sequences."""
    kept: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    """While it is swapped out: the host block of each block of its tables, by group and column."""


class WindowPlans:
    """Makes plans for a worker, runs them and keeps their results.

    Each group of layers has blocks of its own. A block that was freed last is taken first. `spoil` is called with the
    blocks that the window has passed; whatever it writes into them must change no result.
    """

    def __init__(self, worker: ModelWorker, spoil: Callable[[list[int]], None] = lambda _: None) -> None:
        self.facts, self.results = worker.facts(), list[StepResult]()
        self.num_reused = 0
        """Number of blocks that windows had passed and that were given out again."""
        self._run, self._spoil = worker.run, spoil
        order = np.random.default_rng(7).permutation(self.facts.num_blocks)
        self._free: list[int] = order.tolist()
        self._passed = set[int]()
        self._running = dict[str, _Running]()
        self._params = SamplingParams(temperature=0.0, logprobs=self.facts.vocab_size, ignore_eos=True, max_tokens=99)

    def add(self, name: str, row: int, prompt: list[int]) -> None:
        """A sequence that joins with its first share."""
        tables = [list[int]() for _ in range(1 + self.facts.num_windowed_groups)]
        self._running[name] = _Running(row, list(prompt), len(prompt), tables)

    def tokens(self, name: str) -> list[int]:
        """The tokens of a sequence that are known."""
        return self._running[name].token_ids

    def step(self, **shares: Share) -> StepResult:
        """One step of the named sequences, with the blocks that it needs."""
        new, scheduled, swap_in = list[NewSequence](), list[ScheduledSequence](), list[tuple[int, int]]()
        for name, share in shares.items():
            running = self._running[name]
            swap_in += self._swap_in(running)
            drafts = () if isinstance(share, int) else tuple(share)
            num_tokens = share if isinstance(share, int) else 1 + len(drafts)
            end = running.num_computed + num_tokens
            columns = self._grow(running, end)
            samples = end == len(running.token_ids) + len(drafts)
            if running.joins:
                new.append(self._new(running))
            scheduled.append(
                ScheduledSequence(
                    row=running.row,
                    start=running.num_computed,
                    num_tokens=num_tokens,
                    samples=samples,
                    new_block_ids=() if running.joins else tuple(column[0] for column in columns),
                    new_window_ids=() if running.joins else tuple(each for column in columns for each in column[1:]),
                    draft_token_ids=drafts,
                )
            )
            running.joins = False
        return self._finish(StepPlan(
            step=len(self.results) + 1,
            new=tuple(new),
            scheduled=tuple(scheduled),
            swap_in=tuple(swap_in),
            num_tokens=sum(share.num_tokens for share in scheduled),
        ), list(shares))  # fmt: skip

    def swap_out(self, name: str, row: int) -> None:
        """The blocks that a sequence still needs go to the host; with its next share it comes back, in another row."""
        running = self._running[name]
        places = [
            (group, column)
            for group, table in enumerate(running.tables)
            for column in range(running.num_passed if group else 0, len(table))
        ]
        running.kept = {place: number for number, place in enumerate(places)}
        pairs = tuple((running.tables[group][column], host) for (group, column), host in running.kept.items())
        self._run(StepPlan(step=len(self.results) + 1, freed_rows=(running.row,), swap_out=pairs))
        self._free += [block for block, _ in pairs]
        self._spoil([block for block, _ in pairs])
        running.row, running.joins = row, True

    def _swap_in(self, running: _Running) -> list[tuple[int, int]]:
        pairs = list[tuple[int, int]]()
        for (group, column), host in running.kept.items():
            running.tables[group][column] = self._take()
            pairs.append((host, running.tables[group][column]))
        running.kept = {}
        return pairs

    def _new(self, running: _Running) -> NewSequence:
        further = zip(*(table[running.num_passed :] for table in running.tables[1:]), strict=True)
        return NewSequence(
            row=running.row,
            sequence_id=str(running.row),
            token_ids=tuple(running.token_ids),
            num_prompt_tokens=running.num_prompt_tokens,
            block_ids=tuple(running.tables[0]),
            window_ids=tuple(block for column in further for block in column),
            params=self._params,
        )

    def _grow(self, running: _Running, num_tokens: int) -> list[list[int]]:
        """Adds blocks for so many tokens and returns, for each column that is added, a block of each group."""
        missing = -(-num_tokens // self.facts.block_size) - len(running.tables[0])
        columns = [[self._take() for _ in running.tables] for _ in range(missing)]
        for column in columns:
            for table, block in zip(running.tables, column, strict=True):
                table.append(block)
        return columns

    def _take(self) -> int:
        block = self._free.pop()
        self.num_reused += block in self._passed
        self._passed.discard(block)
        return block

    def _finish(self, plan: StepPlan, names: list[str]) -> StepResult:
        result = self._run(plan)
        self.results.append(result)
        sampled = iter(result.token_ids)
        for name, share in zip(names, plan.scheduled, strict=True):
            running = self._running[name]
            running.num_computed = share.start + share.num_tokens
            if share.samples:
                running.token_ids += next(sampled)
                # The tokens of rejected drafts are computed again.
                running.num_computed = len(running.token_ids) - 1
            self._pass(running)
        return result

    def _pass(self, running: _Running) -> None:
        """Frees the blocks that no later token of the sequence sees."""
        seen = max(0, running.num_computed - self.facts.window + 1) // self.facts.block_size
        passed = [block for table in running.tables[1:] for block in table[running.num_passed : seen]]
        running.num_passed = seen
        self._free += passed
        self._passed.update(passed)
        self._spoil(passed)
