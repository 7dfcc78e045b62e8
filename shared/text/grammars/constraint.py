"""Compiles grammars for structured output with the llguidance library: to a matcher that masks tokens.

Compilation is lazy: the library builds its automata while masks are computed. `parser_limits` bounds time and memory of
both, so a hostile grammar causes an error in its own sequence only. Tokenizers check grammars in a process that may be
killed (`services/tokenizer/grammar_worker.py`); engines use them (`services/engine/sampling/grammar.py`).
"""

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from

from antiphon.shared.config import ModelSettings
from antiphon.shared.errors import ServiceError
from antiphon.shared.parameters import tagged_text
from antiphon.shared.parameters.grammar import SUBJECT, Grammar, GrammarKind
from antiphon.shared.parameters.tagged_text import Chain, Json, Literal, Tag, TaggedText
from antiphon.shared.text.grammars.tagged_lark import SPACE, lark_grammar
from antiphon.shared.text.vocabulary import choose_vocabulary

WHITESPACE = SPACE
"""Default whitespace between JSON tokens."""
LEXER_FUEL_START, LEXER_FUEL_STEP = 500_000, 100_000
"""Limits of the lexer's work at the start and for one mask; a unit is about 0.1 µs."""
STEP_ITEMS_MAX, LEXER_STATES_MAX = 25_000, 50_000
"""Maximum number of parser items for one token, and of states of the lexer's automaton."""
GRAMMAR_SIZE_MAX = 250_000
"""Nodes of a grammar after schemas are expanded."""
_LIBRARY_ADVICE = "Enable 'coerce_one_of' option to approximate oneOf with anyOf"
_ADVICE = {
    "Invalid type: ": "The types of JSON Schema are array, boolean, integer, null, number, object and string",
    "Unsatisfiable schema: ": "No value matches it: compare its 'type' with its 'enum', 'const' and limits",
}
"""What to do about a schema, by the beginning of the library's reason."""
FORCED_BYTES = 128
"""Bytes of forced text that are encoded to find its first token, beside twice the longest token of the vocabulary. A
tokenizer looks at no more than a word to find a token."""
FORCED_TEXTS_MAX = 1024
"""Beginnings of forced texts whose tokens are kept. Sequences with the same grammar have the same ones."""
NO_TOKENIZER = "Structured output needs a tokenizer, and this server has none (--skip-tokenizer-init)."


def compile_grammar(grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
    """Returns a matcher in the grammar's initial state.

    Raises ServiceError('invalid_value') with the library's reason.
    """
    matcher = LLMatcher(tokenizer, serialized(grammar, tokenizer), log_level=0, limits=parser_limits())
    if matcher.is_error():
        raise invalid(matcher.get_error())
    return matcher


def check_grammar(grammar: Grammar, tokenizer: LLTokenizer) -> None:
    """Raises ServiceError('invalid_value') for a grammar that does not compile or that no text satisfies.

    If the error is in a schema of a tagged text, `param` is the index of the schema in the request.
    """
    for one in tagged_text.schemas(_tagged_text(grammar)) if grammar.kind == "tagged_text" else ():
        try:
            _check(Grammar("json", json.dumps(one.schema)), tokenizer)
        except ServiceError as error:
            raise ServiceError(error.code, error.message, param=str(one.place)) from None
    _check(grammar, tokenizer)


def _check(grammar: Grammar, tokenizer: LLTokenizer) -> None:
    matcher = compile_grammar(grammar, tokenizer)
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        raise invalid(matcher.get_error())
    if not any(mask) or matcher.is_stopped():
        raise invalid("no output satisfies it")


def invalid(reason: str) -> ServiceError:
    """Returns the error for a grammar that the library refuses. `reason`: the library's message, which is shortened."""
    lines = [line.rstrip() for line in reason.split("<state>")[0].strip().splitlines() if line.strip()]
    told = (
        " ".join(lines[:4]).replace(_LIBRARY_ADVICE, "Give parts that exclude each other, or anyOf")[:400].rstrip(".")
    )
    advice = next((f" {text}." for beginning, text in _ADVICE.items() if told.startswith(beginning)), "")
    return ServiceError("invalid_value", f"{SUBJECT} cannot be used: {told}.{advice}")


def serialized(grammar: Grammar, tokenizer: LLTokenizer) -> str:
    """Returns the grammar in the library's form. Raises ServiceError('invalid_value')."""
    try:
        if grammar.kind in _TAGGED:
            tagged = _TAGGED[grammar.kind](grammar)
            return LLMatcher.grammar_from_lark(lark_grammar(tagged, special_tokens(tokenizer)))
        return _SERIALIZERS[grammar.kind](grammar)
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise invalid(f"{error}" or type(error).__name__) from None


def parser_limits() -> LLParserLimits:
    """Returns the limits of every grammar."""
    return LLParserLimits(
        initial_lexer_fuel=LEXER_FUEL_START,
        step_lexer_fuel=LEXER_FUEL_STEP,
        step_max_items=STEP_ITEMS_MAX,
        max_lexer_states=LEXER_STATES_MAX,
        max_grammar_size=GRAMMAR_SIZE_MAX,
        verbose_errors=False,
    )


@lru_cache(maxsize=2)
def special_tokens(tokenizer: LLTokenizer) -> dict[str, int]:
    """Returns the ids of a tokenizer's special tokens, without those that end an output, by their text."""
    ends = {*tokenizer.eos_tokens, tokenizer.eos_token}
    ids = [one for one in range(tokenizer.vocab_size) if tokenizer.is_special_token(one) and one not in ends]
    texts = ((tokenizer.decode_bytes([one]).decode("utf-8", errors="ignore"), one) for one in ids)
    return {text: one for text, one in texts if text}


def byte_tokenizer() -> LLTokenizer:
    """Returns a tokenizer whose tokens are bytes: enough to check a grammar, without a model's vocabulary."""
    return LLTokenizer("byte")


def model_tokenizer(
    settings: ModelSettings, directory: Path, model_directory: Path, end_token_ids: list[int], vocab_size: int
) -> LLTokenizer:
    """Returns the model's tokenizer for matchers. Takes up to a second for a large vocabulary. Raises ServiceError.

    It encodes only the beginning of a text (`_Tokens`).

    `end_token_ids`: the tokens that end an output, at least one. `vocab_size`: the width of the logits, which may be
    larger than the vocabulary in `directory`.
    """
    if settings.skip_tokenizer_init:
        raise ServiceError("unsupported_parameter", NO_TOKENIZER)
    path = directory / "tokenizer.json"
    if path.is_file() and settings.tokenizer_mode == "auto":
        data = cast(dict[str, Any], json.loads(path.read_text(encoding="utf-8")))
        # A tokenizer file may enable truncation or padding for training, which the library would apply.
        content = json.dumps({**data, "truncation": None, "padding": None})
        size = max(vocab_size, _largest_id(data) + 1)
        whole = LLTokenizer(content, n_vocab=size, eos_token=end_token_ids, slices=[])
        tokens = [whole.decode_bytes([one]) for one in range(size)]
        special = [one for one in range(size) if whole.is_special_token(one)]
        return _masking_tokenizer(tokens, special, end_token_ids, whole.tokenize_bytes)
    vocabulary = choose_vocabulary(settings, directory, model_directory)
    tokens = [vocabulary.token_bytes[one] for one in range(max(vocab_size, vocabulary.size))]
    special = sorted(vocabulary.special_ids)
    greedy = _masking_tokenizer(tokens, special, end_token_ids, lambda _: []).greedy_tokenize
    return _masking_tokenizer(tokens, special, end_token_ids, lambda text: greedy(text.decode(errors="ignore")))


def _masking_tokenizer(
    tokens: list[bytes], special: list[int], end_token_ids: list[int], encode: Callable[[bytes], list[int]]
) -> LLTokenizer:
    """Returns a tokenizer that encodes only the beginning of a text (`_Tokens`)."""
    return LLTokenizer(TokenizerWrapper(_Tokens(tokens, special, end_token_ids[0], encode)), eos_token=end_token_ids)


class _Tokens:
    """A vocabulary with the attributes and the method that `llguidance.TokenizerWrapper` uses.

    If a grammar forces the next bytes, the library encodes all of them for each mask, and allows only the first token.
    For a literal of 60 KB that takes tens of milliseconds. So only the beginning is encoded here. It is longer than
    the first token and what the library drops at the end, because it could become part of a longer token.
    """

    bos_token_id = None

    def __init__(
        self, tokens: list[bytes], special: list[int], eos_token_id: int, encode: Callable[[bytes], list[int]]
    ) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, eos_token_id
        self._encode = lru_cache(maxsize=FORCED_TEXTS_MAX)(encode)
        self._num_bytes = FORCED_BYTES + 2 * max(map(len, tokens))

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text[: self._num_bytes])


def _largest_id(tokenizer: Mapping[str, Any]) -> int:
    added = [int(token["id"]) for token in cast(list[dict[str, Any]], tokenizer.get("added_tokens") or [])]
    vocabulary: Any = tokenizer["model"]["vocab"]
    # Unigram models have a list of tokens, the others a table with ids.
    own = cast(dict[str, int], vocabulary).values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    return max((*added, *own), default=0)


def _json(grammar: Grammar) -> str:
    rule: Any = {"whitespace_flexible": False} if grammar.compact else {}
    return LLMatcher.grammar_from_json_schema(
        grammar.text, overrides=rule or {"whitespace_pattern": grammar.whitespace or WHITESPACE}
    )


def _json_object(grammar: Grammar) -> str:
    return _json(Grammar("json", '{"type": "object"}', grammar.whitespace, grammar.compact))


def _structural_tag(grammar: Grammar) -> TaggedText:
    wanted = json.loads(grammar.text)
    tags: list[Tag] = []
    for one in wanted["structures"]:
        mark = next(trigger for trigger in wanted["triggers"] if one["begin"].startswith(trigger))
        begin, end = Literal(one["begin"].removeprefix(mark)), Literal(one["end"])
        tags.append(Tag(mark, Chain((begin, Json(one.get("schema") or {}), end))))
    return TaggedText(tuple(tags))


def _tagged_text(grammar: Grammar) -> TaggedText:
    return tagged_text.decode(grammar.text)


def _regex(grammar: Grammar) -> str:
    return LLMatcher.grammar_from_regex(grammar.text)


def _choice(grammar: Grammar) -> str:
    return grammar_from("choice", grammar.text)


def _context_free(grammar: Grammar) -> str:
    return grammar_from("grammar", grammar.text)


_SERIALIZERS: dict[GrammarKind, Callable[[Grammar], str]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _context_free,
}
_TAGGED: dict[GrammarKind, Callable[[Grammar], TaggedText]] = {
    "structural_tag": _structural_tag,
    "tagged_text": _tagged_text,
}
