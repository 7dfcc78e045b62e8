"""The logits processor of a thinking budget: ends the model's reasoning after a number of tokens.

The marks around the reasoning are found in the text of the output, as the gateway finds them: a model may write a mark
with other tokens than a tokenizer, which joins its end to a line break, for instance. The state is a function of the
output tokens alone, so preemption, drafts and a move to another engine need no special handling. Made by
`processors_of`.
"""

from collections.abc import Callable, Sequence
from copy import copy
from itertools import accumulate

from antiphon.services.engine.sampling import masks
from antiphon.services.engine.sampling.processor import Adjustment
from antiphon.shared.parameters.thinking import ThinkingBudget

TokenText = Callable[[int, Sequence[int]], bytes]
"""Returns the bytes of a token; none for a special token that is not among the given ones."""


class ThinkingLimit:
    """Allows only the closing mark when the reasoning has used up its budget. Must be the last processor of its row.

    If the other parameters forbid the closing mark, the reasoning goes on. When a budget for several parts of reasoning
    is used up, the opening mark is forbidden. Text before reasoning that cannot repeat is part of the answer, and then
    all further text is.
    """

    needs_tokens = True

    def __init__(self, thinking: ThinkingBudget, vocab_size: int, token_text: TokenText) -> None:
        self._budget, self._repeats, self._vocab_size = thinking.budget, thinking.repeats, vocab_size
        self._token_text, self._shown = token_text, (*thinking.opening, *thinking.closing)
        self._opening = _Mark(thinking.opening, self._text)
        self._closing = _Mark(thinking.closing, self._text)
        self._inside, self._over = thinking.inside, False
        self._num_thought = 0
        """Number of tokens of reasoning, without those of closing marks that have ended."""
        self._tail = b""
        """The end of the output's text, which may have the beginning of the next mark."""

    def append(self, token_id: int) -> None:
        """See LogitsProcessor."""
        if self._over:
            return
        self._num_thought += self._inside
        self._tail += self._text(token_id)
        while self._passes_mark():
            pass

    def adjust(self, adjustment: Adjustment, position: int, drafts: Sequence[int]) -> None:
        """See LogitsProcessor."""
        after = self
        if drafts and not self._over:
            after = copy(self)
            for token_id in drafts:
                after.append(token_id)
        if (token_id := after.forced()) is not None:
            mask = masks.only((token_id,), self._vocab_size)
        elif (token_id := after.forbidden()) is not None:
            mask = masks.without(masks.all_tokens(self._vocab_size), (token_id,), self._vocab_size)
        else:
            return
        if adjustment.mask is None or (adjustment.mask & mask).any():
            adjustment.allow(mask)

    def forced(self) -> int | None:
        """Returns the only token that may come next; None if the budget allows any."""
        if self._over or not self._inside or self._num_thought < self._budget:
            return None
        return self._closing.next_token(self._tail)[1]  # the model may have begun the mark by itself

    def forbidden(self) -> int | None:
        """Returns the token with which reasoning would begin again though the budget is used up; None without one."""
        if self._over or self._inside or not self._repeats or self._num_thought < self._budget:
            return None
        begun, token_id = self._opening.next_token(self._tail)
        return token_id if begun else None

    def _text(self, token_id: int) -> bytes:
        return self._token_text(token_id, self._shown)

    def _passes_mark(self) -> bool:
        """Goes on behind the next mark, if the tail has it. If not, keeps what may be the beginning of the mark."""
        if not self._inside and not self._repeats:
            self._tail = self._tail.lstrip()
            self._over = self._tail[: len(self._opening.text)] != self._opening.text[: len(self._tail)]
        if self._over:
            return False
        mark = self._closing if self._inside else self._opening
        at = self._tail.find(mark.text) if mark.text else -1
        if at < 0:
            self._tail = self._tail[max(0, len(self._tail) - len(mark.text) + 1) :]
            return False
        self._tail, self._over = self._tail[at + len(mark.text) :], self._inside and not self._repeats
        self._num_thought -= self._closing.num_tokens if self._inside else 0
        self._inside = not self._inside
        return not self._over


class _Mark:
    """A mark: its text, and the tokens with which it is forced or forbidden (`num_tokens`)."""

    def __init__(self, token_ids: Sequence[int], token_text: Callable[[int], bytes]) -> None:
        texts = [token_text(token_id) for token_id in token_ids]
        texts[0] = texts[0].lstrip(b" ")  # of tokenizers that begin each text with a space
        self.text, self.num_tokens = b"".join(texts), len(texts)
        self._places = [*zip(accumulate(map(len, texts), initial=0), token_ids, strict=False)][::-1]
        """For each token, the number of bytes before it and the token; the last one first."""

    def next_token(self, tail: bytes) -> tuple[int, int]:
        """Returns how many bytes of the mark a text ends with, and the mark's token after them."""
        return next((size, token_id) for size, token_id in self._places if tail.endswith(self.text[:size]))
