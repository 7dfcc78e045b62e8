"""The draft tokens of one sequence: those that the worker's draft layer has predicted, or else those of its own text.

A sequence whose output is expected has no other drafts than that output (`drafts.expected`).

The draft layer (`EngineFacts.has_draft_layer`) predicts tokens in the step that samples the token before them, so they
must be asked for when that step is planned. How many are asked for follows from how many of the last ones were
accepted, and after several drafts without an accepted token the sequence asks for none for some steps. A sequence whose
blocks lack entries of the draft layer, because steps ran without it, is treated alike: its drafts are accepted less
often. No I/O; one object for each sequence. `core` creates the objects; `policy.drafting` and `step_builder` call them.
"""

from array import array

from antiphon.services.engine.core.drafts.expected import ExpectedTokens
from antiphon.services.engine.core.drafts.prompt_lookup import REST_STEPS_MAX, PromptLookup

FREE_MISSES = 4
"""Number of drafts in a row without an accepted token after which the next ones are still asked for at once. A layer
that is right for half of the tokens rarely misses more often in a row, and a pause costs what it would have saved."""
KEPT = 0.95
"""What is left, after each step, of the counts of drafts and of accepted ones."""


class PredictedTokens:
    """The latest drafts of the draft layer, and how many are asked for, at most `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._reach = 1
        self._misses = self._rest = 0
        self._num_tried = self._num_accepted = 1.0
        """How many drafts of the last steps were compared with the token before them being right, and were right."""
        self._drafts: tuple[int, ...] = ()
        self._num_tokens = 0
        """Number of tokens of the sequence after which `_drafts` come."""

    def num_wanted(self, cost: float) -> int:
        """Returns how many drafts the step that is being planned is to predict; 0 while the sequence pauses.

        `cost`: what a further draft costs, in times of a step without drafts.
        """
        if self._rest:
            self._rest -= 1
            return 0
        # The n-th draft saves a step if all n are right. The first is asked for in any case: it shows what they cost.
        share, wanted = self._num_accepted / self._num_tried, self._reach
        while wanted > 1 and share**wanted < cost:
            wanted -= 1
        return wanted

    def take(self, drafts: tuple[int, ...], num_tokens: int) -> None:
        """Takes the drafts after the first `num_tokens` tokens."""
        self._drafts, self._num_tokens = drafts, num_tokens

    def draft(self, num_tokens: int, most: int) -> tuple[int, ...]:
        """Returns at most `most` drafts after the first `num_tokens` tokens."""
        return self._drafts[: max(0, most)] if num_tokens == self._num_tokens else ()

    def judge(self, num_drafted: int, num_accepted: int) -> None:
        """Records how many of the drafts of a step were accepted."""
        self._num_tried = KEPT * self._num_tried + min(num_drafted, num_accepted + 1)
        self._num_accepted = KEPT * self._num_accepted + num_accepted
        if not num_accepted:
            self._misses += 1
            pause = 2 ** (1 + self._misses - FREE_MISSES)
            self._rest = min(pause, REST_STEPS_MAX) if self._misses > FREE_MISSES else 0
            self._reach = 1
            return
        self._misses = 0
        self._reach = min(self._most, num_accepted + (num_accepted == num_drafted))


class Drafter:
    """The sources of a sequence's drafts. `predicted`: None without a draft layer; `lookup`: None without lookahead."""

    def __init__(self, predicted: PredictedTokens | None, lookup: PromptLookup | ExpectedTokens | None) -> None:
        self.predicted, self.lookup = predicted, lookup
        self._source: PredictedTokens | PromptLookup | ExpectedTokens | None = None
        """Where the drafts of the step in flight come from."""

    def draft(self, tokens: "array[int]", most: int) -> tuple[int, ...]:
        """Returns at most `most` draft tokens after `tokens`."""
        if self.predicted is not None and (found := self.predicted.draft(len(tokens), most)):
            self._source = self.predicted
            return found
        self._source = self.lookup
        return () if self.lookup is None else self.lookup.draft(tokens, most)

    def judge(self, num_drafted: int, num_accepted: int) -> None:
        """Records how many of the tokens that `draft` returned were accepted."""
        assert self._source is not None, "there were no drafts"
        self._source.judge(num_drafted, num_accepted)


def make_drafter(most: int, *, predicts: bool, looks_up: bool) -> Drafter | None:
    """Returns a drafter of at most `most` tokens; None if they come from nowhere."""
    if not (predicts or looks_up):
        return None
    return Drafter(PredictedTokens(most) if predicts else None, PromptLookup(most) if looks_up else None)
