"""A worker for tests of the core: it follows the rules of `plan.py` and asserts that each plan finds what it builds on.

It remembers of each place in each block which prefix it holds the KV of. A wrong prefix hit, a block given away too
early, a row that two sequences share, a token computed twice or never: each shows as a place with other content than
the range of a plan needs.
"""

import random
from dataclasses import dataclass, field

from antiphon.services.engine.core.plan import (
    EngineFacts,
    NewSequence,
    SampledLogprobs,
    ScheduledSequence,
    StepPlan,
    StepResult,
)
from antiphon.shared.codec import pack_ids
from antiphon.shared.messages import PromptLogprobs
from antiphon.shared.parameters.pooling import PoolingKind

EOS, STOP = 2, 9
SAMPLED = (EOS, STOP, *range(10, 20))


@dataclass
class Row:
    """A row of the worker's state table; `prefixes[i]` stands for the tokens up to and including the i-th."""

    sequence_id: str
    salt: bytes
    num_candidates: int = 0
    """How many candidates a beam search needs; 0 for a sequence without beams."""
    num_prompt_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    prefixes: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    columns: list[tuple[int, ...]] = field(default_factory=list)
    """The blocks of the windowed groups beside each block; stale where the window has passed."""
    kind: PoolingKind | None = None
    may_wait: bool = False
    """Whether it may get no token, because it waits for a mask."""
    num_seen: int = 0
    """Positions that were computed for this row since it was filled, from the first on."""

    def append(self, token_ids: tuple[int, ...]) -> None:
        for token_id in token_ids:
            self.tokens.append(token_id)
            self.prefixes.append(hash((self.prefixes[-1] if self.prefixes else self.salt, token_id)))

    def with_draft_tokens(self, token_ids: tuple[int, ...]) -> list[int]:
        """The prefixes as they are if the guesses are right."""
        guessed = Row("", self.salt, 0, 0, list(self.tokens), list(self.prefixes))
        guessed.append(token_ids)
        return guessed.prefixes


class ModelWorker:
    """Carries out plans in order and asserts that each finds the KV that it builds on."""

    def __init__(self, facts: EngineFacts, max_num_seqs: int, waits: float = 0.0) -> None:
        """`waits`: probability that a row gets no token, because it waits for a mask."""
        self.facts = facts
        self.max_num_seqs = max_num_seqs
        self.rows: dict[int, Row] = {}
        self.predictions: dict[str, tuple[int, tuple[int, ...]]] = {}
        """Of each sequence, its latest drafts and the number of tokens after which they come."""
        self.kv: dict[tuple[int, int], object] = {}
        """Block and offset to the prefix whose last token's KV is there; in windowed groups, to group and prefix."""
        self.states: dict[int, int] = {}
        """Slot of a recurrent state to the prefix after which it is."""
        self.host: dict[int, dict[int, object]] = {}
        """Host block to offset to prefix."""
        self.waits = waits
        self.num_waited = self.num_states_read = self.num_snapshots_used = 0
        self.num_behind = self.num_windows_reused = 0

    def run(self, plan: StepPlan, salts: dict[str, bytes], draw: random.Random) -> StepResult:
        for row in plan.freed_rows:
            del self.rows[row]
        self.copy(plan)
        for new in plan.new:
            self.fill(new, salts[new.sequence_id.split()[0]])
        assert len({share.row for share in plan.scheduled}) == len(plan.scheduled), "a row twice in one plan"
        for share in plan.scheduled:
            self.rows[share.row].blocks += share.new_block_ids
            self.rows[share.row].columns += self.columns(share.new_window_ids, len(share.new_block_ids))
        joined = {new.row for new in plan.new}
        for share in plan.scheduled:
            self.write(share, {each.row: each.start for each in plan.scheduled if each.row in joined})
        for share in plan.scheduled:
            self.read(share)
            if self.facts.num_windowed_groups:
                self.num_behind += self.facts.paging.first_read(share.start) > 0
                self.num_windows_reused += share.start > 0 and share.row in joined
        self.carry_states(plan, joined)
        sampled: list[tuple[int, ...]] = []
        logprobs: list[tuple[SampledLogprobs, ...]] = []
        for share in plan.scheduled:
            if share.samples:
                row = self.rows[share.row]
                waits = row.may_wait and draw.random() < self.waits
                self.num_waited += waits
                sampled.append(() if waits else self.sample(share.draft_token_ids, draw))
                logprobs.append(tuple(self.report(row) for _ in sampled[-1]))
                row.append(sampled[-1])
        assert self.facts.has_draft_layer or all(share.num_drafts < 0 for share in plan.scheduled)
        samples = [share for share in plan.scheduled if share.samples]
        drafts = (self.predict(share, draw) if given else () for share, given in zip(samples, sampled, strict=True))
        reports = tuple(self.prompt_report(share) for share in plan.scheduled if share.num_prompt_logprobs)
        vectors = tuple(self.vector(share) for share in plan.scheduled if share.pools)
        return StepResult(
            step=plan.step,
            token_ids=tuple(sampled),
            logprobs=tuple(logprobs),
            prompt_logprobs=reports,
            vectors=vectors,
            draft_token_ids=tuple(drafts) if plan.drafts else (),
            draft_s=draw.choice([0.0, 0.1, 3.0]) if plan.drafts else 0.0,
        )

    def predict(self, share: ScheduledSequence, draw: random.Random) -> tuple[int, ...]:
        """At most as many drafts as are wanted, after a token that was sampled."""
        row = self.rows[share.row]
        drafts = tuple(draw.choice((10, 11)) for _ in range(draw.randint(0, max(0, share.num_drafts))))
        if share.num_drafts > 0:
            self.predictions[row.sequence_id] = len(row.tokens), drafts
        return drafts

    def prompt_report(self, share: ScheduledSequence) -> PromptLogprobs:
        row, first = self.rows[share.row], share.start + 1
        assert 0 < share.num_prompt_logprobs <= min(share.num_tokens, row.num_prompt_tokens - first)
        token_ids = row.tokens[first : first + share.num_prompt_logprobs]
        return PromptLogprobs(start=first, token_ids=pack_ids(token_ids), logprobs=bytes(4 * len(token_ids)))

    def report(self, row: Row) -> SampledLogprobs:
        """The candidates of a beam, which follow from its tokens, so that a search that begins anew finds the same."""
        if not row.num_candidates:
            return SampledLogprobs(-1.0)
        draw = random.Random(row.prefixes[-1])
        token_ids = draw.sample((EOS, STOP, *range(10, 40)), row.num_candidates)
        return SampledLogprobs(-1.0, tuple(token_ids), tuple(sorted((-draw.random() for _ in token_ids), reverse=True)))

    def vector(self, share: ScheduledSequence) -> bytes:
        """Names the sequence and its kind."""
        row = self.rows[share.row]
        assert row.kind == "last" or row.num_seen == len(row.tokens), "hidden states are missing"
        return f"{row.sequence_id} {row.kind}".encode()

    def sample(self, guesses: tuple[int, ...], draw: random.Random) -> tuple[int, ...]:
        """Some of the guesses and one token more, which is not the next guess."""
        right = guesses[: draw.randint(0, len(guesses))]
        wrong = guesses[len(right) : len(right) + 1]
        few = draw.choice([SAMPLED, (10, 11), (10, 11)])
        return (*right, draw.choice([token for token in few if token not in wrong]))

    def copy(self, plan: StepPlan) -> None:
        for pairs in (plan.swap_out, plan.swap_in, plan.copies):
            assert len({target for _, target in pairs}) == len(pairs), "two copies to one block"
        for block, host_block in plan.swap_out:
            assert 0 <= host_block < self.facts.num_host_blocks
            self.host[host_block] = self.content(block)
        held = {block for row in self.rows.values() for block in row.blocks}
        for row in self.rows.values():
            # What the row's next token reads; whatever is before may be anybody's.
            first = self.facts.paging.first_read(len(row.tokens) - 1)
            held.update(block for column in row.columns[first:] for block in column)
        for host_block, block in plan.swap_in:
            assert block not in held, "copied into a block that is held"
            self.put(block, self.host[host_block])
        for source, block in plan.copies:
            assert block not in held, "copied into a block that is held"
            self.put(block, self.content(source))

    def columns(self, block_ids: tuple[int, ...], count: int) -> list[tuple[int, ...]]:
        """The columns of `count` blocks, of which the first may have none."""
        groups = self.facts.num_windowed_groups
        found = [block_ids[first : first + groups] for first in range(0, len(block_ids), groups or 1)]
        assert len(found) <= count
        assert all(len(column) == groups for column in found)
        return [(0,) * groups] * (count - len(found)) + found

    def content(self, block: int) -> dict[int, object]:
        places = ((offset, self.kv.get((block, offset))) for offset in range(self.facts.block_size))
        return {offset: prefix for offset, prefix in places if prefix is not None}

    def put(self, block: int, content: dict[int, object]) -> None:
        for offset in range(self.facts.block_size):
            self.kv.pop((block, offset), None)
        self.kv.update({(block, offset): prefix for offset, prefix in content.items()})

    def fill(self, new: NewSequence, salt: bytes) -> None:
        assert 0 <= new.row < self.max_num_seqs
        assert new.row not in self.rows, "the row is taken"
        num_candidates = new.params.logprobs or 0 if new.params.beam is not None else 0
        row = self.rows[new.row] = Row(
            new.sequence_id,
            salt,
            num_candidates,
            new.num_prompt_tokens,
            blocks=list(new.block_ids),
            columns=self.columns(new.window_ids, len(new.block_ids)),
            kind=None if new.pooling is None else new.pooling.kind,
            may_wait=not num_candidates and (not self.facts.num_states or new.params.grammar is not None),
        )
        row.append(new.token_ids)

    def write(self, share: ScheduledSequence, readers: dict[int, int]) -> None:
        """`readers`: where the sequences that join in this plan start. What is before that they only read."""
        row, end = self.rows[share.row], share.start + share.num_tokens
        assert share.num_tokens > 0
        num_known = end - len(share.draft_token_ids)
        assert num_known <= len(row.tokens), "tokens that nobody knows"
        if share.start == row.num_seen:
            row.num_seen = end
        at_end = num_known == len(row.tokens)
        assert (share.samples, share.pools) == ((at_end, False) if row.kind is None else (False, at_end))
        assert share.samples or not share.draft_token_ids
        prefixes = row.with_draft_tokens(share.draft_token_ids)
        others = {block for number in self.rows if number != share.row for block in self.written(number, readers)}
        for position in range(share.start, end):
            place = self.place(row, position)
            again = position == len(row.tokens) - 1 and self.kv.get(place) == prefixes[position]
            assert again or place[0] not in others, "writes into a block of another"
            self.kv[place] = prefixes[position]
            for group, (block, offset) in enumerate(self.in_windows(row, position)):
                assert again or block not in others, "writes into a column of another"
                self.kv[block, offset] = group, prefixes[position]

    def written(self, number: int, readers: dict[int, int]) -> list[int]:
        """The blocks of a row that nobody else may write: all, but for those that it joins this plan to read."""
        row, first = self.rows[number], readers.get(number, 0) // self.facts.block_size
        read = max(first, self.facts.paging.first_read(len(row.tokens) - 1))
        return row.blocks[first:] + [block for column in row.columns[read:] for block in column]

    def read(self, share: ScheduledSequence) -> None:
        row = self.rows[share.row]
        for position in range(share.start):
            assert self.kv.get(self.place(row, position)) == row.prefixes[position], f"lost KV at {position}"
        for position in range(max(0, share.start - self.facts.window + 1), share.start):
            for group, place in enumerate(self.in_windows(row, position)):
                assert self.kv.get(place) == (group, row.prefixes[position]), f"lost KV of a window at {position}"

    def carry_states(self, plan: StepPlan, joined: set[int]) -> None:
        """Computes the recurrent states: all are read before any is written."""
        if not self.facts.num_states:
            assert not any(share.states for share in plan.scheduled)
            return
        users: dict[int, int] = {}
        """Slot to the only row that may use it if a row writes it."""
        written: dict[int, int] = {}
        for share in plan.scheduled:
            row = self.rows[share.row]
            prefixes = row.with_draft_tokens(share.draft_token_ids)
            assert (share.state < 0) == (share.start == 0)
            assert not share.start or self.states.get(share.state) == prefixes[share.start - 1], "a wrong state"
            self.num_states_read += share.state >= 0
            self.num_snapshots_used += share.state >= 0 and share.row in joined
            counts = [count for count, _ in share.states]
            assert counts == sorted(set(counts))
            assert counts[0] > 0
            assert counts[-1] == share.num_tokens
            for count, slot in share.states:
                assert 0 <= slot < self.facts.num_states
                assert slot not in written, "two states in one slot"
                assert slot != share.state or count == share.num_tokens, "the state is overwritten too early"
                written[slot], users[slot] = prefixes[share.start + count - 1], share.row
        for share in plan.scheduled:
            assert users.get(share.state, share.row) == share.row, "reads a state that another one overwrites"
        self.states.update(written)

    def in_windows(self, row: Row, position: int) -> list[tuple[int, int]]:
        """The places of a position in the windowed groups."""
        index, offset = divmod(position, self.facts.block_size)
        return [(block, offset) for block in row.columns[index]]

    def place(self, row: Row, position: int) -> tuple[int, int]:
        return row.blocks[position // self.facts.block_size], position % self.facts.block_size
