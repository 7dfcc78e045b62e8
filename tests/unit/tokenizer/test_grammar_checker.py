"""Grammars are checked in a process that may die; what it cannot check in time costs only the request."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from antiphon.services.tokenizer.grammar_checker import GrammarChecker
from antiphon.shared.errors import ServiceError
from antiphon.shared.parameters.grammar import Grammar
from antiphon.shared.parameters.tagged_text import Json, Tag, TaggedText

LOOP = '{"$ref": "#/definitions/a", "definitions": {"a": {"$ref": "#/definitions/a"}}}'
LARGE = "{" + '"allOf": [' + ",".join(['{"anyOf": [' + ",".join(f'{{"required": ["k{i}{j}"]}}' for i in range(12)) + "]}" for j in range(7)]) + "]}"  # fmt: skip  # noqa: E501


@pytest.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    found = GrammarChecker()
    yield found
    await found.close()


@pytest.mark.matrix("S-06")
async def test_good_grammars_pass_and_bad_ones_are_named(checker: GrammarChecker) -> None:
    await checker.check(Grammar("json", '{"type": "object"}'), "guided_json")
    await checker.check(Grammar("grammar", 'root ::= "a" | "b" root'), "guided_grammar")
    for grammar in (
        Grammar("json", '{"type": "strng"}'),
        Grammar("json", LOOP),
        Grammar("regex", "(("),
        Grammar("grammar", "start: nowhere"),
        Grammar("json", LARGE),
    ):
        with pytest.raises(ServiceError) as error:
            await checker.check(grammar, "guided_json")
        assert error.value.code == "invalid_value"
        assert error.value.param == "guided_json"
    assert checker.killed == 0


async def test_the_wrong_one_of_several_schemas_is_named_by_its_place(checker: GrammarChecker) -> None:
    def tagged(*wanted: dict[str, str]) -> Grammar:
        tags = tuple(Tag(f"<{place}>", Json(schema, place)) for place, schema in enumerate(wanted))
        return Grammar("tagged_text", TaggedText(tags).encode())

    await checker.check(tagged({"type": "object"}, {"type": "string"}), "tools[].schema")
    for _ in range(2):
        with pytest.raises(ServiceError, match=r"'tools\[1\]\.schema' cannot be used") as error:
            await checker.check(tagged({"type": "object"}, {"type": "strng"}), "tools[].schema")
        assert error.value.param == "tools[1].schema"


@pytest.mark.matrix("S-06")
async def test_a_worker_that_is_too_slow_is_replaced() -> None:
    checker = GrammarChecker(wall_s=0.0)
    with pytest.raises(ServiceError, match="Make it smaller"):
        await checker.check(Grammar("regex", "a"), "guided_regex")
    assert checker.killed == 1
    await checker.close()


async def test_many_requests_at_once_share_the_worker(checker: GrammarChecker) -> None:
    grammars = [Grammar("regex", f"a{{{count}}}") for count in range(1, 9)]
    await asyncio.gather(*(checker.check(grammar, "guided_regex") for grammar in grammars * 3))
    assert checker.killed == 0
