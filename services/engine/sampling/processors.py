"""The logits processors of plain parameters, and the list of processors that a sequence needs.

To add a parameter, add a class here and a line in `processors_of`. Called by the state table.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from antiphon.services.engine.sampling import masks
from antiphon.services.engine.sampling.processor import Adjustment, LogitsProcessor
from antiphon.services.engine.sampling.thinking import ThinkingLimit
from antiphon.shared.parameters.grammar import Grammar
from antiphon.shared.parameters.sampling import SamplingParams


class Grammars(Protocol):
    """What the processors of a worker need to know of its model's texts."""

    def processor(self, grammar: Grammar) -> LogitsProcessor:
        """Returns a processor for a grammar in its initial state."""
        ...

    def token_text(self, token_id: int, shown: Sequence[int]) -> bytes:
        """Returns the bytes of a token; none for a special token that is not among `shown`."""
        ...


def processors_of(
    params: SamplingParams,
    output: Sequence[int],
    end_token_ids: Sequence[int],
    eos_token_ids: frozenset[int],
    vocab_size: int,
    grammars: Grammars | None,
) -> tuple[LogitsProcessor, ...]:
    """Returns the processors of a sequence whose output so far is `output`; empty if it needs none.

    `end_token_ids`: the tokens that end the sequence, which `min_tokens` forbids at first. `eos_token_ids`: the model's
    own end tokens.
    """
    found: list[LogitsProcessor] = []
    if params.logit_bias:
        found.append(LogitBias(params.logit_bias))
    if params.allowed_token_ids is not None:
        found.append(AllowedTokens(params.allowed_token_ids, vocab_size))
    if params.bad_words:
        found.append(BadWords(params.bad_words, vocab_size))
    grammar = params.grammar
    if grammar is not None:
        assert grammars is not None, "the worker has no grammars"
        found.append(grammars.processor(grammar))
        # After an end token the grammar allows nothing, so output that ignores end tokens must not contain one.
        end_token_ids = sorted(eos_token_ids.union(end_token_ids))
        if grammar.is_free and params.ignore_eos:
            found.append(MinTokens(params.max_tokens, sorted(eos_token_ids), vocab_size))
    # After a complete output only an end token is allowed, so a grammar takes precedence over `min_tokens`, unless its
    # output can always continue (`is_free`).
    if params.min_tokens and (grammar is None or grammar.is_free):
        found.append(MinTokens(params.min_tokens, end_token_ids, vocab_size))
    if params.thinking is not None:
        assert grammars is not None, "the worker has no texts of tokens"
        # The last one: it looks at the mask of the others.
        found.append(ThinkingLimit(params.thinking, vocab_size, grammars.token_text))
    for processor in found:
        for token_id in output:
            processor.append(token_id)
    return tuple(found)


class LogitBias(LogitsProcessor):
    """Adds the request's `logit_bias` to the logits."""

    def __init__(self, bias: Sequence[tuple[int, float]]) -> None:
        self._ids = np.array([token_id for token_id, _ in bias], dtype=np.int64)
        self._values = np.array([value for _, value in bias], dtype=np.float32)

    def adjust(self, adjustment: Adjustment, position: int, drafts: Sequence[int]) -> None:
        """See LogitsProcessor."""
        adjustment.biases.append((self._ids, self._values))


class AllowedTokens(LogitsProcessor):
    """Allows only the request's `allowed_token_ids`."""

    def __init__(self, token_ids: Sequence[int], vocab_size: int) -> None:
        self._mask = masks.only(token_ids, vocab_size)

    def adjust(self, adjustment: Adjustment, position: int, drafts: Sequence[int]) -> None:
        """See LogitsProcessor."""
        adjustment.allow(self._mask)


class MinTokens(LogitsProcessor):
    """Forbids the tokens that end the sequence at the first `min_tokens` positions of the output."""

    def __init__(self, min_tokens: int, end_token_ids: Sequence[int], vocab_size: int) -> None:
        self._min_tokens = min_tokens
        self._mask = masks.without(masks.all_tokens(vocab_size), end_token_ids, vocab_size)

    def adjust(self, adjustment: Adjustment, position: int, drafts: Sequence[int]) -> None:
        """See LogitsProcessor."""
        if position < self._min_tokens:
            adjustment.allow(self._mask)


class BadWords(LogitsProcessor):
    """Forbids sequences of tokens in the output.

    The last token of such a sequence is forbidden whenever the output ends with all its other tokens.
    """

    def __init__(self, words: Sequence[Sequence[int]], vocab_size: int) -> None:
        self._vocab_size = vocab_size
        everything = masks.all_tokens(vocab_size)
        self._mask = masks.without(everything, [word[0] for word in words if len(word) == 1], vocab_size)
        self._long = tuple(tuple(word) for word in words if len(word) > 1)
        self._reach = max(map(len, self._long), default=1) - 1
        self._tail: list[int] = []
        """The last tokens of the output: as many as the longest word has before its last token."""
        self.needs_tokens = bool(self._long)

    def append(self, token_id: int) -> None:
        """See LogitsProcessor."""
        if self._reach:
            self._tail = [*self._tail, token_id][-self._reach :]

    def adjust(self, adjustment: Adjustment, position: int, drafts: Sequence[int]) -> None:
        """See LogitsProcessor."""
        before = (*self._tail, *drafts)
        ends = [word[-1] for word in self._long if before[len(before) - len(word) + 1 :] == word[:-1]]
        adjustment.allow(masks.without(self._mask, ends, self._vocab_size) if ends else self._mask)
