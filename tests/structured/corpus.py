"""Valid instances of JSON Schemas that a grammar must take token by token, from a directory or drawn at random.

A directory is that of a draft of JSON-Schema-Test-Suite: files with a list of `{schema, tests: [{data, valid}]}`. A
schema that the grammar compiler refuses is counted and left out. An instance is a value, and a grammar takes texts:
members of objects come in one order there, and an integer has no decimals, so a value counts as taken if one of its
spellings is.
"""

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from antiphon.shared.config import EngineSettings
from antiphon.shared.errors import ServiceError
from antiphon.shared.models.model_files import DEMO_DIRECTORY
from antiphon.shared.parameters.grammar import Grammar
from antiphon.shared.text.grammars.constraint import check_grammar, compile_grammar, model_tokenizer

SPELLINGS_MAX = 64
_ORDERED_MEMBERS_MAX = 4
"""Members of an object that are tried in every order."""


@dataclass
class Counted:
    """What a corpus has shown. Instances are named `FILE: SCHEMA: TEST`."""

    refused_schemas: int = 0
    schemas: int = 0
    valid: int = 0
    invalid: int = 0
    not_taken: list[str] = field(default_factory=list[str])
    """Valid instances that the grammar does not take in any spelling."""
    wrongly_taken: list[str] = field(default_factory=list[str])
    """Instances that the suite calls invalid, and that the grammar takes."""


def demo_tokenizer() -> LLTokenizer:
    """Returns the tokenizer of the demo model, with tokens of several characters, for matchers."""
    return model_tokenizer(EngineSettings(), DEMO_DIRECTORY, DEMO_DIRECTORY, [0], 0)


def of_directory(directory: Path, tokenizer: LLTokenizer) -> Counted:
    """Checks every schema and instance of a directory, without those of the directories in it."""
    found = Counted()
    for path in sorted(directory.glob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            start = start_of(group["schema"], tokenizer)
            if start is None:
                found.refused_schemas += 1
                continue
            found.schemas += 1
            for test in group["tests"]:
                _count(found, f"{path.name}: {group['description']}: {test['description']}", start, test)
    return found


def start_of(schema: Any, tokenizer: LLTokenizer) -> LLMatcher | None:
    """Returns the matcher at the start of a schema; None if the product refuses the schema."""
    grammar = Grammar("json", json.dumps(schema))
    try:
        check_grammar(grammar, tokenizer)
        return compile_grammar(grammar, tokenizer)
    except ServiceError:
        return None


def takes(start: LLMatcher, text: str) -> bool:
    """Whether a grammar takes each token of a text, and the text may end there."""
    matcher = start.deep_copy()
    return all(map(matcher.consume_token, _encoder().encode(text).ids)) and matcher.is_accepting()


@cache
def _encoder() -> Tokenizer:
    """Returns the demo model's tokenizer for texts of any length; that for matchers encodes only their beginning."""
    return Tokenizer.from_file(str(DEMO_DIRECTORY / "tokenizer.json"))


def spellings(value: Any) -> Iterator[str]:
    """Yields texts of a JSON value: with its members in other orders, and numbers without decimals that are zero."""
    if isinstance(value, dict):
        members: list[tuple[str, Any]] = list(value.items())
        orders = itertools.permutations(members) if len(members) <= _ORDERED_MEMBERS_MAX else iter([tuple(members)])
        for order in orders:
            for texts in itertools.product(*(list(itertools.islice(spellings(each), 4)) for _, each in order)):
                named = [
                    f"{json.dumps(name, ensure_ascii=False)}:{text}"
                    for (name, _), text in zip(order, texts, strict=True)
                ]
                yield f"{{{','.join(named)}}}"
    elif isinstance(value, list):
        items: list[Any] = value
        for texts in itertools.product(*(list(itertools.islice(spellings(each), 4)) for each in items)):
            yield f"[{','.join(texts)}]"
    else:
        yield _quoted(value)
        if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53:
            yield str(int(value))


def _quoted(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def drawn(chance: random.Random, depth: int = 0) -> tuple[dict[str, Any], Any]:
    """Returns a random schema and a valid instance of it."""
    kinds = [_text, _whole, _number, _fixed]
    return chance.choice(kinds if depth > 2 else [*kinds, _listed, _tuple, _object, _object, _either])(chance, depth)


def layouts(value: Any) -> list[str]:
    """Returns a value as JSON without whitespace, as Python writes it, and with each member on a line of its own."""
    compact = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return [compact, json.dumps(value, ensure_ascii=False), json.dumps(value, indent=1, ensure_ascii=False)]


def _count(found: Counted, name: str, start: LLMatcher, test: dict[str, Any]) -> None:
    texts = itertools.islice(spellings(test["data"]), SPELLINGS_MAX)
    taken = any(takes(start, text) for text in texts)
    if test["valid"]:
        found.valid += 1
        found.not_taken += [] if taken else [name]
    else:
        found.invalid += 1
        found.wrongly_taken += [name] if taken else []


def _text(chance: random.Random, _: int) -> tuple[dict[str, Any], Any]:
    if chance.random() < 0.3:
        return {"type": "string", "pattern": "^[a-c]+-[0-9]{2}$"}, f"{'abc'[: chance.randint(1, 3)]}-07"
    text = "".join(chance.choices('ab Z09"\\\n\t/é好😀', k=chance.randint(0, 8)))
    return {"type": "string", "minLength": len(text) // 2, "maxLength": len(text) + 2}, text


def _whole(chance: random.Random, _: int) -> tuple[dict[str, Any], Any]:
    number = chance.randint(-(10**6), 10**6)
    return {"type": "integer", "minimum": number - chance.randint(0, 99), "maximum": number + 7}, number


def _number(chance: random.Random, _: int) -> tuple[dict[str, Any], Any]:
    number = round(chance.uniform(-1000, 1000), chance.randint(1, 4))
    return {"type": "number"} | ({"minimum": number - 1.5} if chance.random() < 0.5 else {}), number


def _fixed(chance: random.Random, _: int) -> tuple[dict[str, Any], Any]:
    values = [None, True, "red", 7, {"a": [1]}, [], "é"]
    value = chance.choice(values)
    if isinstance(value, bool):
        return {"type": "boolean"}, value
    return {"const": value} if chance.random() < 0.3 else {"enum": values}, value


def _listed(chance: random.Random, depth: int) -> tuple[dict[str, Any], Any]:
    schema, value = drawn(chance, depth + 1)
    count = chance.randint(0, 3)
    return {"type": "array", "items": schema, "minItems": count, "maxItems": count + 1}, [value] * count


def _tuple(chance: random.Random, depth: int) -> tuple[dict[str, Any], Any]:
    parts = [drawn(chance, depth + 1) for _ in range(chance.randint(1, 3))]
    return {"type": "array", "prefixItems": [one for one, _ in parts], "items": False}, [value for _, value in parts]


def _object(chance: random.Random, depth: int) -> tuple[dict[str, Any], Any]:
    parts = {f"k{number}": drawn(chance, depth + 1) for number in range(chance.randint(0, 4))}
    required = [name for name in parts if chance.random() < 0.6]
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: one for name, (one, _) in parts.items()},
        "required": required,
        "additionalProperties": {"type": "integer"} if chance.random() < 0.3 else False,
    }
    value = {name: one for name, (_, one) in parts.items() if name in required or chance.random() < 0.5}
    return schema, value | ({"other": 5} if schema["additionalProperties"] else {})


def _either(chance: random.Random, depth: int) -> tuple[dict[str, Any], Any]:
    parts = [drawn(chance, depth + 1) for _ in range(2)]
    return {"anyOf": [one for one, _ in parts]}, chance.choice(parts)[1]
