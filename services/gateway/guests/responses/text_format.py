"""Reads `text`, the format of a response's text: free text, a JSON object, or JSON that follows a schema. Pure."""

from collections.abc import Mapping
from typing import Any, cast

from antiphon.services.gateway.apis.openai.bodies.content_blocks import check_fields
from antiphon.shared import limits
from antiphon.shared.request.checks import missing, refuse

FREE_TEXT = {"type": "text"}
NAMES = {
    "guided_json": "text.format.schema",
    "guided_json_object": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
}
"""Maps the fields of a chat body that `structure_fields` returns to the parameters of this API, for error messages."""
_MEMBERS = {
    "text": ("type",),
    "json_object": ("type", "schema"),
    # Name and description are meant for models that read the schema in the prompt; here the grammar enforces the
    # schema.
    "json_schema": ("type", "schema", "name", "description", "strict"),
}


def structure_fields(text: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the fields of a chat body that set the structure of the output. Raises ServiceError."""
    check_fields(text or {}, ("format",), "text")
    return _structure(output_format(text))


def output_format(text: Mapping[str, Any] | None) -> Any:
    """Returns `text.format`, or its default. It is not checked."""
    wanted = (text or {}).get("format")
    return FREE_TEXT if wanted is None else wanted


def _structure(wanted: Any) -> dict[str, Any]:
    if not isinstance(wanted, Mapping):
        refuse("text.format", "must be an object with a 'type'")
    members = cast(Mapping[str, Any], wanted)
    kind = members.get("type")
    if kind is None:
        missing("text.format.type")
    if not isinstance(kind, str) or kind not in _MEMBERS:
        refuse("text.format.type", "must be 'text', 'json_object' or 'json_schema'")
    check_fields(members, _MEMBERS[kind], "text.format")
    for name in ("name", "description"):
        if len(str(members.get(name) or "")) > limits.GRAMMAR_BYTES_MAX:
            refuse(f"text.format.{name}", f"must have at most {limits.GRAMMAR_BYTES_MAX} characters")
    if kind == "json_schema" and members.get("strict") is True:
        strict = {"schema": _schema(members.get("schema")), "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": strict}}
    if kind == "json_schema" or members.get("schema") is not None:
        return {"guided_json": _schema(members.get("schema"))}
    return {"guided_json_object": kind == "json_object"}


def _schema(schema: Any) -> Mapping[str, Any]:
    if schema is None:
        missing("text.format.schema")
    if not isinstance(schema, Mapping):
        refuse("text.format.schema", "must be a JSON Schema: an object")
    return cast(Mapping[str, Any], schema)
