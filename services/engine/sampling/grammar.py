"""Structured output in the worker: compiled grammars, and the logits processor that applies a grammar.

The state of a grammar is a function of the output tokens. It is recomputed when a sequence joins, so preemption, forks,
several choices and a move to another engine need no special handling.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLMatcher, LLTokenizer

from antiphon.services.engine.sampling import masks
from antiphon.services.engine.sampling.mask_time import MaskAccount
from antiphon.services.engine.sampling.processor import Adjustment
from antiphon.shared import limits
from antiphon.shared.config import EngineSettings
from antiphon.shared.errors import ServiceError
from antiphon.shared.models.model_files import model_directory, tokenizer_directory
from antiphon.shared.parameters.grammar import Grammar
from antiphon.shared.text.grammars import constraint

TOKENS_AT_A_TIME = 4
"""Output tokens that a matcher gets before its time is checked."""


class GrammarCompiler:
    """The compiled grammars of a model. `compile` may be called on any thread, the rest on the step thread.

    `load_tokenizer` is called once, at the first grammar or thinking budget.
    """

    def __init__(self, load_tokenizer: Callable[[], LLTokenizer], vocab_size: int) -> None:
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        """LRU cache of matchers in their initial state, with the first mask computed; the most recently used is last.
        """
        self._again = ThreadPoolExecutor(1, "grammars-again")
        """Compiles grammars that are no longer in the cache when their sequence joins."""

    def compile(self, grammar: Grammar) -> LLMatcher:
        """Returns the grammar's matcher in its initial state, which must be copied before it consumes tokens.

        Takes milliseconds, and at most some tenths of a second. Raises ServiceError.
        """
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return self._compiled[grammar]
        matcher = constraint.compile_grammar(grammar, self._loaded())
        matcher.compute_bitmask()
        with self._lock:
            self._compiled[grammar] = matcher
            if len(self._compiled) > limits.COMPILED_GRAMMARS_MAX:
                self._compiled.popitem(last=False)
        return matcher

    def token_text(self, token_id: int, shown: Sequence[int]) -> bytes:
        """Returns the bytes of a token; none for a special token that is not among `shown`.

        Waits for the tokenizer, unless a grammar has been compiled.
        """
        tokenizer = self._tokenizer or self._loaded()
        is_hidden = token_id not in shown and tokenizer.is_special_token(token_id)
        return b"" if is_hidden else tokenizer.decode_bytes([token_id])

    def processor(self, grammar: Grammar) -> "GrammarProcessor":
        """Returns a processor in the initial state of the grammar. Does not wait if the grammar must be compiled."""
        with self._lock:
            matcher = self._compiled.get(grammar)
        if matcher is None:
            return GrammarProcessor(self._again.submit(self.compile, grammar), self._vocab_size)
        compiled: Future[LLMatcher] = Future()
        compiled.set_result(matcher)
        return GrammarProcessor(compiled, self._vocab_size)

    def _loaded(self) -> LLTokenizer:
        with self._lock:
            self._tokenizer = self._tokenizer or self._load_tokenizer()
            return self._tokenizer


def grammar_compiler(settings: EngineSettings, end_token_ids: frozenset[int], vocab_size: int) -> GrammarCompiler:
    """Returns the compiler of a model's engine. It reads the tokenizer's files at the first grammar."""

    def load() -> LLTokenizer:
        if not end_token_ids:
            raise ServiceError(
                "unsupported_parameter", "Structured output and thinking budgets need a model with an end token."
            )
        directories = tokenizer_directory(settings), model_directory(settings, weights=False)
        return constraint.model_tokenizer(settings, *directories, sorted(end_token_ids), vocab_size)

    return GrammarCompiler(load, vocab_size)


class GrammarProcessor:
    """A LogitsProcessor that allows the tokens with which the output can still satisfy a grammar.

    After a complete output only end tokens are allowed. `compiled`: the matcher in its initial state, or the
    ServiceError of a grammar that does not compile.
    """

    needs_tokens = True

    def __init__(self, compiled: "Future[LLMatcher]", vocab_size: int) -> None:
        self.account = MaskAccount()
        """The time that the grammar takes. The caller of `catch_up` and `adjust` keeps it."""
        self._compiled = compiled
        self._vocab_size = vocab_size
        self._matcher: LLMatcher | None = None
        self._error = ""
        self._new_tokens: deque[int] = deque()
        self._mask: masks.Mask | None = None
        """The mask of the next token, if it is computed."""

    @property
    def num_pending(self) -> int:
        """Number of output tokens that the matcher has not got yet."""
        return len(self._new_tokens)

    def append(self, token_id: int) -> None:
        """See LogitsProcessor. The matcher gets the token later, while the model computes."""
        self._new_tokens.append(token_id)
        self._mask = None

    def catch_up(self, has_time: Callable[[], bool]) -> bool:
        """Passes the output tokens to the matcher. After each few tokens it stops unless `has_time`.

        Returns whether `adjust` can be called without a wait. If the grammar is not compiled yet, it cannot.
        """
        if self._matcher is None and not self._compiled.done():
            return False
        while len(self._new_tokens) > TOKENS_AT_A_TIME:
            self._take_tokens(TOKENS_AT_A_TIME)
            if not has_time():
                return False
        return True

    def adjust(self, adjustment: Adjustment, position: int, drafts: Sequence[int]) -> None:
        """See LogitsProcessor."""
        if self._new_tokens or self._matcher is None:
            self._take_tokens(len(self._new_tokens))
        matcher = self._matcher
        if self._error or matcher is None:
            adjustment.error = self._error
            return
        if not drafts and self._mask is not None:
            adjustment.allow(self._mask)
            return
        taken = matcher.try_consume_tokens(list(drafts)) if drafts else 0
        if taken == len(drafts):
            mask = self._add_mask(adjustment, matcher)
            self._mask = self._mask if drafts else mask
        if taken:
            matcher.rollback(taken)

    def _take_tokens(self, count: int) -> None:
        """Passes output tokens to the matcher."""
        if self._matcher is None and not self._error:
            try:
                self._matcher = self._compiled.result().deep_copy()
            except ServiceError as error:
                self._error = error.message
        tokens = [self._new_tokens.popleft() for _ in range(count)]
        matcher = self._matcher
        if tokens and matcher is not None and not matcher.is_error() and not matcher.consume_tokens(tokens):
            self._error = constraint.invalid(matcher.get_error()).message

    def _add_mask(self, adjustment: Adjustment, matcher: LLMatcher) -> masks.Mask | None:
        packed = matcher.compute_bitmask()
        if matcher.is_error():
            adjustment.error = self._error = constraint.invalid(matcher.get_error()).message
            return None
        mask = masks.of_bytes(packed, self._vocab_size)
        adjustment.allow(mask)
        return mask
