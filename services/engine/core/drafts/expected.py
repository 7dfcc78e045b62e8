"""Drafts the output that the caller of the engine expects, to check it in few steps instead of generating it.

The caller gives the whole expected output (`SequenceSpec.expected_token_ids`). As long as the sequence follows it, each
step computes as many expected tokens as it has room for, and the rule for accepting drafts keeps exactly those that
would have been sampled. From the first other token on there are no drafts. No I/O; one object for each sequence, made
by `core`.
"""

from array import array
from collections.abc import Sequence


class ExpectedTokens:
    """The expected output of one sequence, of which a step drafts at most `most` tokens."""

    def __init__(self, expected: Sequence[int], num_prompt_tokens: int, most: int) -> None:
        self._expected = array("I", expected)
        self._num_prompt_tokens = num_prompt_tokens
        self._most = most
        self._num_equal = 0
        """Number of leading output tokens that are known to be the expected ones."""

    def draft(self, tokens: "array[int]", most: int) -> tuple[int, ...]:
        """Returns at most `most` expected tokens after `tokens`; none if the output is not the expected one."""
        known = len(tokens) - self._num_prompt_tokens
        since = self._num_prompt_tokens + self._num_equal
        if tokens[since:] != self._expected[self._num_equal : known]:
            return ()
        self._num_equal = known
        return tuple(self._expected[known : known + max(0, min(most, self._most))])

    def judge(self, num_drafted: int, num_accepted: int) -> None:
        """Does nothing: rejected tokens are seen by the next `draft`."""
