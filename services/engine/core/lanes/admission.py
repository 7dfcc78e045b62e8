"""Which sequence of the queue joins next, and whether it may: what all lanes do alike that let sequences join.

No waiting sequence overtakes the head of the queue. The last rows are kept for clients without running sequences, and a
part of the blocks (`--kv-cache-ratio`) for the output of the running ones.
"""

from antiphon.services.engine.core.kv.reuse import Reusable, Shortage
from antiphon.services.engine.core.plan import CoreLimits
from antiphon.services.engine.core.policy.batching import BatchGate
from antiphon.services.engine.core.policy.delay import AdmissionDelay
from antiphon.services.engine.core.residency import Residency
from antiphon.services.engine.core.sequence import Sequence, Status
from antiphon.services.engine.core.step_builder import StepBuilder
from antiphon.shared.batch_rows import num_reserved_rows


class Admission:
    """The gates before the queue, and what its head lacked when it did not fit."""

    def __init__(self, limits: CoreLimits, residency: Residency) -> None:
        size, wait_s = limits.max_batch_size, limits.batch_wait_timeout
        self.batches = None if size is None else BatchGate(size, wait_s)
        ratio, num_blocks = limits.kv_cache_ratio, residency.pool.num_blocks
        self.reserved_blocks = 0 if ratio is None else num_blocks - int(ratio * num_blocks)
        """Number of blocks that must stay free when a sequence joins running ones."""
        self._reserved_rows = num_reserved_rows(limits.max_num_seqs)
        factor = limits.scheduler_delay_factor
        self._delay = AdmissionDelay(factor) if factor else None
        self._limits = limits
        self._residency = residency
        self._shortage: Shortage | None = None

    # --- gates --------------------------------------------------------------------------------------------------------

    def opens(self, now_s: float) -> bool:
        """Whether waiting sequences may join in the step that is being planned. To be called once for each plan."""
        queue = self._residency.waiting
        head = queue.head()
        if self.batches is not None:
            self.batches.look(head, queue.num_waiting, now_s)
        if head is None or not self._has_gathered(head, 0):
            return False
        # `passed` must be asked in any case: it starts the head's wait.
        return self._delay is None or self._delay.passed(now_s) or not self._residency.num_ordinary

    def admits(self, head: Sequence, builder: StepBuilder) -> bool:
        """Whether the head may join a step for which the gates are open, besides those that join already."""
        return self._has_gathered(head, len(builder.joined)) and builder.limited(head, 1) > 0

    def _has_gathered(self, head: Sequence, num_joined: int) -> bool:
        """Whether the batch of the head starts, in a plan that `num_joined` sequences have already joined."""
        return self.batches is None or self.batches.admits(head, num_joined)

    def planned(self, builder: StepBuilder) -> None:
        """Records which sequences join in a complete plan. To be called before they run."""
        if self.batches is None and self._delay is None:
            return
        ordinary = [sequence for sequence in builder.joined if not sequence.idle]
        if self.batches is not None and any(sequence.status is not Status.PREEMPTED for sequence in ordinary):
            self.batches.started()
        if self._delay is not None and ordinary:
            self._delay.joined(builder.step, builder.now_s)

    def step_ended(self, step: int, now_s: float) -> None:
        """Records that a step has ended."""
        if self._delay is not None:
            self._delay.step_ended(step, now_s)

    # --- rows ---------------------------------------------------------------------------------------------------------

    @property
    def num_free_rows(self) -> int:
        """Number of rows for sequences that are not idle: `fit` can preempt those that yield."""
        return self._residency.rows.num_free + self._residency.yielding.num_rows

    def head(self) -> Sequence | None:
        """Returns the waiting sequence that joins next if it fits; None if there is no row for any.

        The last rows are reserved for clients without a running sequence, which would otherwise have to wait until a
        sequence of another client ends. Sequences without a client may use all rows, and so may a beam search, which
        waits until there are rows for all its beams. A sequence whose adapter has no slot waits until no running
        sequence uses one of the slots.
        """
        residency, num_free = self._residency, self.num_free_rows
        head = residency.waiting.head(newcomers_only=num_free <= self._reserved_rows) if num_free else None
        if head is None or head.num_rows > num_free:
            return None
        return head if residency.rows.has_slots(head) or residency.yielding.holds_slots else None

    def cannot_join(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence is known to lack rows, blocks or an adapter slot."""
        is_short = self._shortage is not None and self._shortage.sequence is sequence
        return is_short or not self._residency.rows.has_slots(sequence) or sequence.num_rows > self.num_free_rows

    # --- blocks -------------------------------------------------------------------------------------------------------

    def reusable_of_fitting(self, sequence: Sequence, budget: int, spare_blocks: int) -> Reusable | None:
        """Returns the reusable KV of a waiting sequence; None if the sequence does not fit now.

        A sequence fits if there are blocks for all its known tokens with `spare_blocks` left free, and if the budget
        has room for all tokens to compute (with chunked prefill: for one token). All known tokens need blocks even if
        only part of them is scheduled now, because a prefill that is preempted half-way is wasted. Also returns None if
        the sequence would have much less to compute in the next step (`Reusable.worth_waiting`).
        """
        pool, prefix_cache = self._residency.pool, self._residency.prefix_cache
        num_free, known = pool.num_free - spare_blocks, self._shortage
        if known is not None and known.sequence is sequence and known.goes_on(num_free, budget, pool):
            return None
        found = self._residency.find_reusable(sequence)
        if found.worth_waiting or not self._residency.states.has_room():
            return None
        # Shared blocks on the free list will no longer be free, although they are not new.
        num_free_hits = sum(map(pool.is_free, found.reused))
        num_blocks = self._residency.blocks_for(sequence.num_tokens) - len(found.shared) + num_free_hits
        # An image that must not be cut may take the step beyond its budget.
        most = max(budget, sequence.uncut(found.num_tokens, 1))
        end = min(sequence.num_tokens, found.num_tokens + most)
        num_blocks += self._residency.windows.demand(found.window_first, len(found.window), end)
        num_tokens = 1 if self._limits.enable_chunked_prefill else sequence.num_tokens - found.num_tokens
        if num_blocks <= num_free and num_tokens <= budget:
            return found
        first_miss = prefix_cache.first_miss(sequence, len(found.shared))
        self._shortage = Shortage(sequence, num_blocks, num_tokens, first_miss)
        return None

    def fit(self, head: Sequence, budget: int, spare_blocks: int) -> Reusable | None:
        """Like `reusable_of_fitting`, but first preempts idle sequences whose rows or blocks `head` needs."""
        rows, yielding, pool = self._residency.rows, self._residency.yielding, self._residency.pool
        while rows.num_free < head.num_rows or not rows.has_slots(head):
            if not yielding.give_way(for_a_slot=rows.num_free >= head.num_rows):
                return None
        while (found := self.reusable_of_fitting(head, budget, spare_blocks)) is None:
            short, num_free = self._shortage, pool.num_free - spare_blocks
            # If the head waits for other reasons than blocks, preempting does not help it.
            if short is None or short.sequence is not head or short.num_tokens > budget or short.num_blocks <= num_free:
                return None
            # Nor if the blocks of all that yield would not be enough.
            if short.num_blocks > num_free + yielding.num_blocks() or not yielding.give_way():
                return None
        return found

    def join(self, head: Sequence, found: Reusable, builder: StepBuilder, most: int | None = None) -> int:
        """Lets the head of a queue join, see `Residency.join`. `most`: None for the rest of the budget."""
        self._shortage = None
        return self._residency.join(head, found, builder, builder.budget if most is None else most)
