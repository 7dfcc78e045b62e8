"""The logits processor of a thinking budget: ends the model's reasoning after a number of tokens.

Its state is a function of the output tokens alone, so preemption, drafts and a move to another engine need no special
handling. Made by `processors_of`.
"""

from collections.abc import Sequence
from copy import copy

from antiphon.services.engine.sampling import masks
from antiphon.services.engine.sampling.processor import Adjustment
from antiphon.shared.parameters.thinking import ThinkingBudget


class ThinkingLimit:
    """Allows only the closing mark when the reasoning has used up its budget. Must be the last processor of its row.

    Only the first reasoning of an output counts, because only that is separated from the answer. If the other
    parameters forbid the closing mark, the reasoning goes on.
    """

    needs_tokens = True

    def __init__(self, thinking: ThinkingBudget, vocab_size: int) -> None:
        self._budget, self._opening, self._closing = thinking.budget, thinking.opening, thinking.closing
        self._vocab_size = vocab_size
        self._inside, self._over = thinking.inside, False
        self._num_thought = 0
        """Number of tokens since the opening mark."""
        self._tail: tuple[int, ...] = ()
        """The last tokens of the output: as many as the longer mark has."""

    def append(self, token_id: int) -> None:
        """See LogitsProcessor."""
        if self._over:
            return
        self._tail = (*self._tail, token_id)[-max(len(self._opening), len(self._closing)) :]
        self._num_thought += self._inside
        if self._inside and _ends_with(self._tail, self._closing):
            self._inside, self._over = False, True
        elif not self._inside and _ends_with(self._tail, self._opening):
            self._inside, self._tail = True, ()

    def adjust(self, adjustment: Adjustment, position: int, drafts: Sequence[int]) -> None:
        """See LogitsProcessor."""
        after = self
        if drafts and not self._over:
            after = copy(self)
            for token_id in drafts:
                after.append(token_id)
        token_id = after.forced()
        if token_id is None:
            return
        mask = masks.only((token_id,), self._vocab_size)
        if adjustment.mask is None or (adjustment.mask & mask).any():
            adjustment.allow(mask)

    def forced(self) -> int | None:
        """Returns the only token that may come next; None if the budget allows any."""
        if not self._inside or self._num_thought < self._budget:
            return None
        # The model may have begun the mark by itself.
        return self._closing[_num_begun(self._tail, self._closing)]


def _ends_with(tail: tuple[int, ...], mark: tuple[int, ...]) -> bool:
    return tail[-len(mark) :] == mark


def _num_begun(tail: tuple[int, ...], mark: tuple[int, ...]) -> int:
    """Returns how many tokens of the mark the tail ends with, at most all but the last."""
    return next(number for number in range(len(mark) - 1, -1, -1) if not number or tail[-number:] == mark[:number])
