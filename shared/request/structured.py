"""Converts the request fields for structured output to a `Grammar`. Pure; grammars are compiled elsewhere.

    guided_json, guided_regex, guided_choice, guided_grammar, guided_json_object      vLLM's fields
    structured_outputs                                                                the same in one object
    response_format                                                                   OpenAI's field

A request may ask for one of them. A schema may be a JSON object, its text, or (in Python) a pydantic model's class. In
vLLM's fields an object has only the properties that its schema names, unless the schema says otherwise.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, cast

import msgspec

from antiphon.shared.parameters.grammar import Grammar, GrammarKind
from antiphon.shared.parameters.tagged_text import TaggedText
from antiphon.shared.request.checks import missing, refuse, unsupported
from antiphon.shared.request.schemas.closed_objects import closed
from antiphon.shared.request.schemas.relaxation import relaxed

BACKENDS = frozenset({"auto", "guidance", "llguidance", "outlines", "lm-format-enforcer", "xgrammar"})
"""Values of `guided_decoding_backend`. llguidance compiles all grammars; the value has no effect."""
CHOICES_MAX = 1024
TAGS_MAX = 128
_KINDS: Mapping[str, GrammarKind] = {
    "json": "json",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
_OPTIONS = frozenset({"whitespace_pattern", "disable_any_whitespace", "disable_fallback", "backend"})


class Constraint(NamedTuple):
    """A grammar and the field that asks for it, for errors.

    `is_strict`: whether the output must follow all of the field's schema. If not, `ignored` names keywords of the
    schema that the grammar does without.
    """

    grammar: Grammar
    param: str
    is_strict: bool = False
    ignored: tuple[str, ...] = ()


def constraint_of(fields: object) -> Constraint | None:
    """Returns the constraint that the fields of a request set; None if they set none. Raises ServiceError.

    `fields` may lack fields; a missing one counts as None.
    """
    asked = list[Constraint]()
    for name, read in _READERS.items():
        if (value := getattr(fields, name, None)) is not None and (one := read(value, name)) is not None:
            asked.append(one)
    found = list(map(_relaxed, asked))
    backend = getattr(fields, "guided_decoding_backend", None)
    if backend is not None and str(backend).partition(":")[0] not in BACKENDS:
        refuse("guided_decoding_backend", f"must be one of {', '.join(sorted(BACKENDS))}")
    if len(found) > 1:
        refuse(found[1].param, f"cannot be given together with '{found[0].param}'")
    if found and getattr(fields, "use_beam_search", None):
        refuse(found[0].param, "cannot be given together with 'use_beam_search'")
    pattern = getattr(fields, "guided_whitespace_pattern", None)
    if pattern is None:
        return found[0] if found else None
    if not found or found[0].grammar.kind not in ("json", "json_object"):
        refuse("guided_whitespace_pattern", "needs 'guided_json' or 'guided_json_object'")
    return _checked(_with_whitespace(found[0], pattern, "guided_whitespace_pattern"))


def json_constraint(schema: Mapping[str, Any], param: str, *, is_strict: bool) -> Constraint:
    """Returns the constraint to JSON that matches a schema, for the field `param`. Raises ServiceError."""
    return _relaxed(_checked(Constraint(Grammar("json", _schema_text(schema, param)), param, is_strict)))


def tagged_constraint(tagged: TaggedText, param: str) -> Constraint:
    """Returns the constraint to text with tags. `param`: path of its schemas, with `[]` for the index.

    Raises ServiceError.
    """
    grammar = Grammar("tagged_text", tagged.encode())
    _checked(Constraint(grammar, param.partition("[]")[0]))
    return Constraint(grammar, param)


def _reader(kind: GrammarKind) -> Callable[[Any, str], Constraint | None]:
    return lambda value, param: _constraint(kind, value, param)


def _constraint(kind: GrammarKind, value: Any, param: str) -> Constraint | None:
    if value is False and kind == "json_object":
        return None
    return _checked(Constraint(Grammar(kind, _TEXTS[kind](value, param)), param))


def _guided_json(value: Any, param: str) -> Constraint:
    return _checked(Constraint(Grammar("json", _schema_text(value, param, objects_closed=True)), param))


def _checked(constraint: Constraint) -> Constraint:
    if excess := constraint.grammar.excess:
        refuse(constraint.param, excess)
    return constraint


def _relaxed(constraint: Constraint) -> Constraint:
    """Returns the constraint without the keywords of its schema that no grammar can enforce (`schemas.relaxation`)."""
    grammar = constraint.grammar
    if grammar.kind != "json":
        return constraint
    schema = json.loads(grammar.text)
    found = relaxed(schema, exact=constraint.is_strict)
    if found.schema == schema:
        return constraint
    text = json.dumps(found.schema, separators=(",", ":"))
    return constraint._replace(grammar=msgspec.structs.replace(grammar, text=text), ignored=found.ignored)


def _structured_outputs(value: Any, param: str) -> Constraint | None:
    """Reads `structured_outputs`: an object with one kind of structure, or a Python object with such an attribute."""
    all_fields = _mapping(value)
    asked = {name: each for name, each in all_fields.items() if each is not None and each is not False}
    for name in asked:
        if name not in _KINDS and name not in _OPTIONS:
            unsupported(f"{param}.{name}", f"'{param}.{name}' is")
    kinds = [name for name in asked if name in _KINDS]
    if len(kinds) != 1:
        refuse(param, f"must have exactly one of {', '.join(_KINDS)}")
    read = _guided_json if kinds[0] == "json" else _reader(_KINDS[kinds[0]])
    found = read(asked[kinds[0]], f"{param}.{kinds[0]}")
    if found is not None and "whitespace_pattern" in asked:
        found = _with_whitespace(found, asked["whitespace_pattern"], f"{param}.whitespace_pattern")
    if found is not None and asked.get("disable_any_whitespace"):
        found = found._replace(grammar=Grammar(found.grammar.kind, found.grammar.text, compact=True))
    return found


def _mapping(value: Any) -> Mapping[str, Any]:
    return cast(Mapping[str, Any], value if isinstance(value, Mapping) else vars(value))


def _response_format(value: Any, param: str) -> Constraint | None:
    """Reads OpenAI's `response_format`."""
    if not isinstance(value, Mapping):
        refuse(param, "must be an object with a 'type'")
    asked = cast(Mapping[str, Any], value)
    kind = asked.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = asked.get("schema")
        return (
            Constraint(Grammar("json_object"), param)
            if schema is None
            else _constraint("json", schema, f"{param}.schema")
        )
    if kind == "json_schema":
        schema = asked.get("json_schema")
        if not isinstance(schema, Mapping):
            missing(f"{param}.json_schema")
        members = cast(Mapping[str, Any], schema)
        wanted = members.get("schema")
        found = _constraint("json", {} if wanted is None else wanted, f"{param}.json_schema.schema")
        return found and found._replace(is_strict=members.get("strict") is True)
    if kind == "structural_tag":
        return _constraint("structural_tag", {k: v for k, v in asked.items() if k != "type"}, param)
    refuse(f"{param}.type", "must be 'text', 'json_object', 'json_schema' or 'structural_tag'")


def _with_whitespace(found: Constraint, pattern: Any, param: str) -> Constraint:
    if not isinstance(pattern, str) or not pattern:
        refuse(param, "must be a regular expression")
    return found._replace(grammar=Grammar(found.grammar.kind, found.grammar.text, pattern))


def _schema_text(value: Any, param: str, objects_closed: bool = False) -> str:
    if isinstance(value, type) and hasattr(value, "model_json_schema"):
        value = cast(Any, value).model_json_schema()
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            refuse(param, f"is not valid JSON: {error}")
    if not isinstance(value, Mapping | bool):
        refuse(param, "must be a JSON Schema: an object, or its text")
    try:
        return json.dumps(closed(value) if objects_closed else value)
    except (TypeError, ValueError, RecursionError):
        refuse(param, "must be a JSON Schema: an object, or its text")


def _plain_text(value: Any, param: str) -> str:
    if not isinstance(value, str) or not value:
        refuse(param, "must be a text that is not empty")
    return value


def _choices_text(value: Any, param: str) -> str:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    choices: list[Any] = list(cast(Sequence[Any], value)) if is_list else []
    if not 1 <= len(choices) <= CHOICES_MAX or not all(isinstance(one, str) and one for one in choices):
        refuse(param, f"must be a list of 1 to {CHOICES_MAX} texts")
    return json.dumps(choices)


def _flag_text(value: Any, param: str) -> str:
    if value is not True:
        refuse(param, "must be true or false")
    return ""


_Trigger = Annotated[str, msgspec.Meta(min_length=1)]


class _Structure(msgspec.Struct):
    begin: str
    end: str
    schema: dict[str, Any] = {}


class _StructuralTag(msgspec.Struct, forbid_unknown_fields=True):
    structures: Annotated[list[_Structure], msgspec.Meta(min_length=1, max_length=TAGS_MAX)]
    triggers: Annotated[
        list[Annotated[str, msgspec.Meta(min_length=1)]], msgspec.Meta(min_length=1, max_length=TAGS_MAX)
    ]


def _tags_text(value: Any, param: str) -> str:
    try:
        asked = msgspec.json.decode(value, type=_StructuralTag) if isinstance(value, str) else None
        asked = asked or msgspec.convert(value, _StructuralTag)
    except msgspec.MsgspecError as error:
        refuse(param, f"must have 'structures' (objects with 'begin', 'schema' and 'end') and 'triggers': {error}")
    for number, one in enumerate(asked.structures):
        if not any(one.begin.startswith(trigger) for trigger in asked.triggers):
            refuse(f"{param}.structures[{number}].begin", "must begin with one of the triggers")
    return msgspec.json.encode(asked).decode()


_TEXTS: Mapping[GrammarKind, Callable[[Any, str], str]] = {
    "json": _schema_text,
    "json_object": _flag_text,
    "regex": _plain_text,
    "choice": _choices_text,
    "grammar": _plain_text,
    "structural_tag": _tags_text,
}
_READERS: Mapping[str, Callable[[Any, str], Constraint | None]] = {
    "guided_json": _guided_json,
    "guided_json_object": _reader("json_object"),
    "guided_regex": _reader("regex"),
    "guided_choice": _reader("choice"),
    "guided_grammar": _reader("grammar"),
    "structured_outputs": _structured_outputs,
    "response_format": _response_format,
}
FIELDS = (*_READERS, "guided_decoding_backend", "guided_whitespace_pattern")
"""The fields of a request that `constraint_of` reads."""
