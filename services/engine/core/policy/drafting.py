"""Draft tokens of running sequences: proposes them for a step and records which are accepted.

Used only by `residency`.
"""

from antiphon.services.engine.core.sequence import Sequence
from antiphon.shared.messages import EngineCounters


def propose(sequence: Sequence, budget: int, tally: EngineCounters) -> tuple[int, ...]:
    """Returns at most `budget` draft tokens for a sequence with one token to compute, else none."""
    if sequence.drafter is None or sequence.num_in_flight or sequence.num_unscheduled_tokens != 1:
        return ()
    # The step samples one token in any case, and the sequence must not get more than `max_tokens`.
    most = min(budget, sequence.rules.max_tokens - sequence.num_output_tokens - 1)
    draft_tokens = sequence.drafter.draft(sequence.tokens, most)
    tally.drafted_tokens += len(draft_tokens)
    tally.drafts += bool(draft_tokens)
    return draft_tokens


def judge(sequence: Sequence, num_draft_tokens: int, num_accepted: int, tally: EngineCounters) -> int:
    """Records how many draft tokens were accepted. Returns how many were rejected."""
    name = sequence.sequence_id
    assert 0 <= num_accepted <= num_draft_tokens, f"{name}: {num_accepted} of {num_draft_tokens} draft tokens accepted"
    assert sequence.drafter is not None, f"{name} has no draft tokens"
    sequence.drafter.judge(num_draft_tokens, num_accepted)
    sequence.num_drafted_tokens = 0
    tally.accepted_tokens += num_accepted
    before = tally.accepted_by_position
    more = [count + 1 for count in before[:num_accepted]] + [1] * (num_accepted - len(before))
    tally.accepted_by_position = (*more, *before[num_accepted:])
    return num_draft_tokens - num_accepted
