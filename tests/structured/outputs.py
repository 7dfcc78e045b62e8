"""Random requests for structured output, and whether an output has the structure, by a judge of its own kind.

All outputs are short, whatever the model prefers, so that none is cut off.
"""

import itertools
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jsonschema

from antiphon import LLM, SamplingParams

TOKENS_MAX = 2000
CALL = 250
"""Prompts of one call of the model."""


@dataclass(frozen=True)
class Case:
    """The value of `structured_outputs`, and the judge of an output."""

    kind: str
    fields: dict[str, Any]
    holds: Callable[[str], bool]


def cases(chance: random.Random) -> list[Case]:
    """Returns one case of each kind."""
    return [_of_schema(chance), _of_regex(chance), _of_choice(chance), _of_grammar(chance)]


def wrong_outputs(llm: LLM, count: int, seed: int) -> list[str]:
    """Has a model make `count` outputs, as many of each kind. Returns those without their structure."""
    chance = random.Random(seed)
    made = list(itertools.chain.from_iterable(cases(chance) for _ in range(-(-count // 4))))[:count]
    found: list[str] = []
    for first in range(0, count, CALL):
        some = made[first : first + CALL]
        params = [
            SamplingParams(
                temperature=chance.choice([0.0, 0.7, 1.0, 2.0]), max_tokens=TOKENS_MAX, structured_outputs=case.fields
            )
            for case in some
        ]
        prompts = [f"Write {chance.random()}: " for _ in some]
        for case, output in zip(some, llm.generate(prompts, params, use_tqdm=False), strict=True):
            one = output.outputs[0]
            if one.finish_reason != "stop" or one.text is None or not case.holds(one.text):
                found.append(f"{case.kind} {case.fields}: {one.finish_reason} {one.text!r}")
    return found


def finite(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    """Returns a random schema whose instances all are short."""
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": chance.randint(0, 4)},
        {"type": "string", "pattern": "^[a-z]{2}[0-9]?$"},
        {"type": "integer", "minimum": -9, "maximum": chance.randint(0, 999)},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["red", 7, None, "blue"][: chance.randint(1, 4)]},
        {"const": {"x": [1, "é"]}},
    ]
    drawn = chance.random()
    if depth > 1 or drawn < 0.35:
        return chance.choice(kinds)
    if drawn < 0.5:
        return {"type": "array", "items": finite(chance, depth + 1), "minItems": 1, "maxItems": 2}
    if drawn < 0.6:
        return {"anyOf": [finite(chance, depth + 1), finite(chance, depth + 1)]}
    names = [f"k{number}" for number in range(chance.randint(1, 3))]
    properties = {name: finite(chance, depth + 1) for name in names}
    required = [name for name in names if chance.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _of_schema(chance: random.Random) -> Case:
    schema = finite(chance)

    def holds(text: str) -> bool:
        try:
            jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
        except (ValueError, jsonschema.ValidationError):
            return False
        return True

    return Case("json_schema", {"json": schema}, holds)


def _of_regex(chance: random.Random) -> Case:
    pattern = _pattern(chance)
    return Case("regex", {"regex": pattern}, lambda text: re.fullmatch(pattern, text) is not None)


def _pattern(chance: random.Random, depth: int = 0) -> str:
    if depth > 2 or chance.random() < 0.3:
        return chance.choice(["[a-f]", "x", "[0-9]{1,3}", "é", r"\.", "[^a-z\n]", "(yes|no)", "[A-Z]?"])
    parts = [_pattern(chance, depth + 1) for _ in range(chance.randint(2, 3))]
    if chance.random() < 0.4:
        return f"({'|'.join(parts)})"
    return f"({''.join(parts)}){chance.choice(['', '?', '{1,2}', '{2}'])}"


def _of_choice(chance: random.Random) -> Case:
    words = ["".join(chance.choices("abcXYZ é好-1", k=chance.randint(1, 12))) for _ in range(chance.randint(1, 9))]
    return Case("choice", {"choice": words}, lambda text: text in words)


def _of_grammar(chance: random.Random) -> Case:
    """A list of pairs, or brackets to a depth: the same language once as a grammar and once as a regular expression."""
    most = chance.randint(1, 4)
    if chance.random() < 0.5:
        rules = [f't{level}: "(" t{level + 1} ")" | "x"' for level in range(most)]
        grammar = "\n".join(["start: t0", *rules, f't{most}: "x"'])
        return Case("grammar", {"grammar": grammar}, lambda text: _bracketed(text, most))
    grammar = f'start: pair ("," pair){{0,{most}}}\npair: KEY "=" NUMBER\nKEY: /[a-z]{{1,4}}/\nNUMBER: /[0-9]{{1,3}}/'
    language = re.compile(rf"[a-z]{{1,4}}=[0-9]{{1,3}}(,[a-z]{{1,4}}=[0-9]{{1,3}}){{0,{most}}}")
    return Case("grammar", {"grammar": grammar}, lambda text: language.fullmatch(text) is not None)


def _bracketed(text: str, most: int) -> bool:
    depth = text.count("(")
    return depth <= most and text == "(" * depth + "x" + ")" * depth
