"""Structured output in the worker: compiled grammars, and the logits processor that applies a grammar.

The state of a grammar is a function of the output tokens. It is recomputed when a sequence joins, so preemption, forks,
several choices and a move to another engine need no special handling.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from llguidance import LLMatcher, LLTokenizer

from services.engine.sampling import masks
from services.engine.sampling.processor import Adjustment
from shared import limits
from shared.config import EngineSettings
from shared.errors import ServiceError
from shared.models.model_files import model_directory, tokenizer_directory
from shared.parameters.grammar import Grammar
from shared.text.grammars import constraint


class GrammarCompiler:
    """The compiled grammars of a model. `compile` may be called on any thread, the rest on the step thread.

    `load_tokenizer` is called once, at the first grammar.
    """

    def __init__(self, load_tokenizer: Callable[[], LLTokenizer], vocab_size: int) -> None:
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        """LRU cache of matchers in their initial state, with the first mask computed; the most recently used is last.
        """

    def compile(self, grammar: Grammar) -> LLMatcher:
        """Returns the grammar's matcher in its initial state, which must be copied before it consumes tokens.

        Takes milliseconds, and at most some tenths of a second. Raises ServiceError.
        """
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return self._compiled[grammar]
            self._tokenizer = self._tokenizer or self._load_tokenizer()
        matcher = constraint.compile_grammar(grammar, self._tokenizer)
        matcher.compute_bitmask()
        with self._lock:
            self._compiled[grammar] = matcher
            if len(self._compiled) > limits.COMPILED_GRAMMARS_MAX:
                self._compiled.popitem(last=False)
        return matcher

    def processor(self, grammar: Grammar) -> "GrammarProcessor":
        """Returns a processor in the initial state of the grammar."""
        try:
            return GrammarProcessor(self.compile(grammar).deep_copy(), self._vocab_size)
        except ServiceError as error:
            return GrammarProcessor(None, self._vocab_size, error.message)


def grammar_compiler(settings: EngineSettings, end_token_ids: frozenset[int], vocab_size: int) -> GrammarCompiler:
    """Returns the compiler of a model's engine. It reads the tokenizer's files at the first grammar."""

    def load() -> LLTokenizer:
        if not end_token_ids:
            raise ServiceError("unsupported_parameter", "Structured output needs a model with an end token.")
        directories = tokenizer_directory(settings), model_directory(settings, weights=False)
        return constraint.model_tokenizer(settings, *directories, sorted(end_token_ids), vocab_size)

    return GrammarCompiler(load, vocab_size)


class GrammarProcessor:
    """A LogitsProcessor that allows the tokens with which the output can still satisfy a grammar.

    After a complete output only end tokens are allowed. `matcher` is None if the grammar does not compile (`error`).
    """

    needs_tokens = True

    def __init__(self, matcher: LLMatcher | None, vocab_size: int, error: str = "") -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._error = error
        self._new_tokens: list[int] = []

    def append(self, token_id: int) -> None:
        """See LogitsProcessor. The matcher gets the token in `adjust`, which runs while the model computes."""
        self._new_tokens.append(token_id)

    def adjust(self, adjustment: Adjustment, position: int, drafts: Sequence[int]) -> None:
        """See LogitsProcessor."""
        if self._new_tokens:
            self._consume()
        if self._error or self._matcher is None:
            adjustment.error = self._error
            return
        taken = self._matcher.try_consume_tokens(list(drafts)) if drafts else 0
        if taken == len(drafts):
            self._add_mask(adjustment, self._matcher)
        if taken:
            self._matcher.rollback(taken)

    def _consume(self) -> None:
        tokens, self._new_tokens = self._new_tokens, []
        matcher = self._matcher
        if matcher is not None and not matcher.is_error() and not matcher.consume_tokens(tokens):
            self._error = constraint.invalid(matcher.get_error()).message

    def _add_mask(self, adjustment: Adjustment, matcher: LLMatcher) -> None:
        packed = matcher.compute_bitmask()
        if matcher.is_error():
            adjustment.error = self._error = constraint.invalid(matcher.get_error()).message
        else:
            adjustment.allow(masks.of_bytes(packed, self._vocab_size))
