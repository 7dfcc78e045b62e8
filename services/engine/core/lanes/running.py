"""The lane of the running sequences: the next tokens of those that are not idle, oldest first."""

from collections.abc import Callable, Iterable

from antiphon.services.engine.core.lanes.lane import Lane, Shared
from antiphon.services.engine.core.policy.decode_turns import DecodeTurns
from antiphon.services.engine.core.policy.prefill_shares import shares_of
from antiphon.services.engine.core.residency import Residency
from antiphon.services.engine.core.sequence import Sequence
from antiphon.services.engine.core.step_builder import StepBuilder

TRIED_MAX = 8
"""Sequences in a step that wait for the masks of their grammars. One that gets a token makes room for another."""


class RunningLane(Lane):
    """Divides a step among clients: prompts by `prefill_shares`, decoding sequences by `decode_turns`."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self._turns = DecodeTurns(shared.times)

    def schedule(self, builder: StepBuilder) -> None:
        """Schedules the running sequences. If blocks ran out, nobody may join: the step is closed."""
        residency, joining, rests = self._residency, self._joining(builder), left_out(self._residency.running)
        ordinary, shares = residency.running[: residency.num_ordinary], None
        has_clients = residency.waiting.num_running_clients + (joining is not None) > 1
        if has_clients:
            rests |= self._turns.resting(ordinary, joining, builder.now_s)
            if self._limits.enable_chunked_prefill:
                shares = shares_of(ordinary, joining, builder.budget)

        def of_prompt(sequence: Sequence, num_tokens: int) -> int:
            if shares is not None:
                num_tokens = min(num_tokens, shares[sequence.client])
                shares[sequence.client] -= num_tokens
            return num_tokens

        builder.closed = not continue_running(residency, builder, of_prompt, rests)
        if builder.closed and not builder.scheduled:
            # Blocks ran out for those whose turn it was, and with theirs others go on.
            continue_running(residency, builder, of_prompt, frozenset())
        if has_clients:
            self._turns.used({one.row for one in builder.scheduled})

    def _joining(self, builder: StepBuilder) -> Sequence | None:
        """Returns the first waiting sequence of clients that have nothing running, if it can join; else None."""
        may_join = builder.may_join and self._admission.num_free_rows
        head = self._residency.waiting.head(newcomers_only=True) if may_join else None
        return None if head is None or not head.client or self._admission.cannot_join(head) else head


def continue_running(
    residency: Residency,
    builder: StepBuilder,
    of_prompt: Callable[[Sequence, int], int],
    rests: frozenset[int],
    *,
    idle: bool = False,
) -> bool:
    """Schedules the running sequences, oldest first. Returns False if blocks ran out; then no sequence may join.

    `of_prompt`: called with a sequence and a number of its prompt tokens for which there is budget, at least two;
    returns how many of them to schedule. `rests`: rows of decoding sequences that are left out. `idle`: whether to
    schedule the idle sequences or the ordinary ones.
    """
    running = residency.running
    index, num_running = residency.num_ordinary * idle, len(running)
    # Drafts of idle sequences would make the steps of others longer.
    may_draft = not idle or not index
    # Preemption removes sequences from the end of the list, so the index stays valid.
    while index < len(running) and builder.budget > 0 and running[index].idle == idle:
        sequence = running[index]
        num_tokens = builder.limited(sequence, min(sequence.num_unscheduled_tokens, builder.budget))
        if num_tokens == 1 and (builder.room <= 0 or sequence.row in rests):
            num_tokens = 0
        if num_tokens > 1:
            num_tokens = of_prompt(sequence, num_tokens)
        if (num_tokens := sequence.uncut(sequence.num_scheduled_tokens, num_tokens)) > 0:
            # The sequences after it come before its draft tokens.
            others = len(running) - index
            draft_budget = builder.budget - others if builder.num_drafting and may_draft else None
            if not residency.extend(sequence, num_tokens, builder, draft_budget):
                return False
        index += 1
    return len(running) == num_running


def left_out(running: Iterable[Sequence]) -> frozenset[int]:
    """Returns the rows of sequences that the next step leaves out because they wait for the masks of their grammars.

    Their last token (`StepResult.token_ids`) would be computed in vain if the worker computes other masks again. So
    only a few of them, those that have been left out longest, are tried in each step.
    """
    waiting = [sequence for sequence in running if sequence.again]
    if len(waiting) <= TRIED_MAX:
        return frozenset()
    waiting.sort(key=lambda sequence: sequence.again)
    return frozenset(sequence.row for sequence in waiting[TRIED_MAX:])
