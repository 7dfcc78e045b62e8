"""Grammars in the worker: masks, the end of an output, draft tokens, and the state after a sequence has moved."""

import json
import random
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from antiphon.services.engine.sampling import masks
from antiphon.services.engine.sampling.grammar import TOKENS_AT_A_TIME, GrammarCompiler, GrammarProcessor
from antiphon.services.engine.sampling.processor import Adjustment
from antiphon.services.engine.sampling.processors import processors_of
from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.models.model_files import DEMO_DIRECTORY
from antiphon.shared.parameters.grammar import Grammar
from antiphon.shared.parameters.sampling import SamplingParams
from antiphon.shared.text.grammars import constraint

END = 0
SIZE = 4100
"""Width of the logits: more than the 4,096 tokens of the vocabulary."""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "kind": {"enum": ["a", "b"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_DIRECTORY / "tokenizer.json"))


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    content = Path(DEMO_DIRECTORY / "tokenizer.json").read_text()
    return GrammarCompiler(lambda: LLTokenizer(content, n_vocab=SIZE, eos_token=[END]), SIZE)


def mask_of(processor: GrammarProcessor, drafts: tuple[int, ...] = ()) -> np.ndarray:
    adjustment = Adjustment()
    processor.adjust(adjustment, 0, drafts)
    assert not adjustment.error
    assert adjustment.mask is not None
    return adjustment.mask


def allowed(processor: GrammarProcessor, drafts: tuple[int, ...] = ()) -> list[int]:
    return masks.allowed_ids(mask_of(processor, drafts), SIZE).tolist()


def walk(processor: GrammarProcessor, seed: int) -> list[int]:
    """The tokens of a random output, which the end token ends."""
    chance, tokens = random.Random(seed), list[int]()
    while not tokens or tokens[-1] != END:
        tokens.append(chance.choice(allowed(processor)))
        processor.append(tokens[-1])
        assert len(tokens) < 500
    return tokens


@pytest.mark.parametrize("seed", range(20))
def test_every_random_walk_ends_with_an_output_that_validates(
    compiler: GrammarCompiler, tokenizer: Tokenizer, seed: int
) -> None:
    tokens = walk(compiler.processor(Grammar("json", json.dumps(SCHEMA))), seed)
    value = json.loads(tokenizer.decode(tokens[:-1]))
    assert set(value) == {"name", "kind"}
    assert len(value["name"]) <= 4
    assert value["kind"] in ("a", "b")


def test_after_a_complete_output_only_the_end_token_is_allowed(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    processor = compiler.processor(Grammar("choice", '["yes", "no"]'))
    for token_id in tokenizer.encode("yes", add_special_tokens=False).ids:
        assert END not in allowed(processor)
        processor.append(token_id)
    assert allowed(processor) == [END]


def test_a_processor_made_anew_from_the_output_allows_the_same(compiler: GrammarCompiler) -> None:
    grammar = Grammar("json", json.dumps(SCHEMA))
    one = compiler.processor(grammar)
    tokens = walk(compiler.processor(grammar), 3)
    for count, token_id in enumerate(tokens):
        moved = compiler.processor(grammar)
        for each in tokens[:count]:
            moved.append(each)
        assert np.array_equal(mask_of(moved), mask_of(one))
        one.append(token_id)


def test_draft_tokens_are_looked_through_and_taken_back(compiler: GrammarCompiler) -> None:
    grammar = Grammar("json", json.dumps(SCHEMA))
    tokens = walk(compiler.processor(grammar), 5)
    for count in range(len(tokens) - 3):
        ahead, step = compiler.processor(grammar), compiler.processor(grammar)
        for each in tokens[:count]:
            ahead.append(each)
        for each in tokens[: count + 3]:
            step.append(each)
        before = mask_of(ahead)
        assert np.array_equal(mask_of(ahead, tuple(tokens[count : count + 3])), mask_of(step))
        assert np.array_equal(mask_of(ahead), before)
    adjustment = Adjustment()
    compiler.processor(grammar).adjust(adjustment, 0, (SIZE - 1, 5))
    assert adjustment.mask is None
    assert not adjustment.error


@pytest.mark.matrix("R-06")
def test_a_grammar_that_does_not_compile_is_an_error_of_its_sequence(compiler: GrammarCompiler) -> None:
    with pytest.raises(ServiceError, match="cannot be used"):
        compiler.compile(Grammar("regex", "(("))
    adjustment = Adjustment()
    compiler.processor(Grammar("regex", "((")).adjust(adjustment, 0, ())
    assert "cannot be used" in adjustment.error


@pytest.mark.matrix("R-06")
def test_a_token_outside_the_grammar_is_an_error_of_its_sequence(compiler: GrammarCompiler) -> None:
    processor = compiler.processor(Grammar("regex", "a"))
    processor.append(4000)
    adjustment = Adjustment()
    processor.adjust(adjustment, 1, ())
    assert adjustment.error


def test_equal_grammars_are_compiled_once(compiler: GrammarCompiler) -> None:
    assert compiler.compile(Grammar("regex", "ab+")) is compiler.compile(Grammar("regex", "ab+"))


def test_a_grammar_that_is_no_longer_kept_is_compiled_again_while_its_sequence_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "COMPILED_GRAMMARS_MAX", 1)
    content, begun, go_on = Path(DEMO_DIRECTORY / "tokenizer.json").read_text(), Event(), Event()
    compiler = GrammarCompiler(lambda: LLTokenizer(content, n_vocab=SIZE, eos_token=[END]), SIZE)
    compiler.compile(Grammar("regex", "ab"))
    compiler.compile(Grammar("regex", "cd"))
    compile_grammar = constraint.compile_grammar

    def compile_later(*arguments: Any) -> Any:
        begun.set()
        assert go_on.wait(30)
        return compile_grammar(*arguments)

    monkeypatch.setattr(constraint, "compile_grammar", compile_later)
    processor = compiler.processor(Grammar("regex", "ab"))
    assert begun.wait(30)
    assert not processor.catch_up(lambda: True)
    go_on.set()
    assert len(allowed(processor)) > 0  # waits for the thread
    assert processor.catch_up(lambda: True)


def test_output_tokens_are_passed_on_while_there_is_time(compiler: GrammarCompiler) -> None:
    grammar = Grammar("json", json.dumps(SCHEMA))
    tokens = next(found for seed in range(100) if len(found := walk(compiler.processor(grammar), seed)) > 12)[:-1]
    moved, stays = compiler.processor(grammar), compiler.processor(grammar)
    for token_id in tokens:
        moved.append(token_id)
        stays.append(token_id)
    num_tries = 0
    while not moved.catch_up(lambda: False):
        num_tries += 1
        assert moved.num_pending == len(tokens) - num_tries * TOKENS_AT_A_TIME
    assert num_tries == (len(tokens) - 1) // TOKENS_AT_A_TIME
    assert np.array_equal(mask_of(moved), mask_of(stays))
    assert moved.num_pending == 0


def test_free_text_with_tags_ends_neither_before_min_tokens_nor_where_ends_are_ignored(
    compiler: GrammarCompiler,
) -> None:
    tag = {"begin": "<n>", "schema": {"type": "integer"}, "end": "</n>"}
    free = Grammar("structural_tag", json.dumps({"structures": [tag], "triggers": ["<n>"]}))

    def may_end(position: int, grammar: Grammar, **fields: Any) -> bool:
        params = SamplingParams(max_tokens=9, grammar=grammar, **fields)
        adjustment = Adjustment()
        for one in processors_of(params, (), [], frozenset({END}), SIZE, compiler):
            one.adjust(adjustment, position, ())
        assert adjustment.mask is not None
        return END in masks.allowed_ids(adjustment.mask, SIZE)

    assert may_end(0, free)
    assert [may_end(position, free, min_tokens=2) for position in range(4)] == [False, False, True, True]
    assert not any(may_end(position, free, ignore_eos=True) for position in range(9))
    anything = Grammar("regex", "a*")
    assert may_end(0, anything, ignore_eos=True, min_tokens=2)
