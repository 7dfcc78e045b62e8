"""Reads `text`, the format of a response's text: free text, a JSON object, or JSON that follows a schema. Pure."""

from collections.abc import Mapping
from typing import Any, cast

from shared.errors import ServiceError
from shared.request.checks import missing, refuse

FREE_TEXT = {"type": "text"}
NAMES = {"guided_json": "text.format.schema", "guided_json_object": "text.format"}
"""Maps the fields of a chat body that `structure_fields` returns to the parameters of this API, for error messages."""
_MEMBERS = {
    "text": ("type",),
    "json_object": ("type",),
    # Name and description are meant for models that read the schema in the prompt; here the grammar enforces the
    # schema.
    "json_schema": ("type", "schema", "name", "description", "strict"),
}


def structure_fields(text: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the fields of a chat body that set the structure of the output. Raises ServiceError."""
    for name, value in (text or {}).items():
        if name not in ("format", "verbosity"):
            raise ServiceError("unsupported_parameter", f"'text' has an unknown field '{name}'.", param="text")
        if name == "verbosity" and value not in (None, "medium"):
            message = "The value of 'text.verbosity' is not supported yet."
            raise ServiceError("unsupported_parameter", message, param="text.verbosity")
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
    for name in members:
        if name not in _MEMBERS[kind]:
            message = f"'text.format' has an unknown field '{name}'."
            raise ServiceError("unsupported_parameter", message, param="text.format")
    if kind == "json_schema":
        return {"guided_json": _schema(members.get("schema"))}
    return {"guided_json_object": kind == "json_object"}


def _schema(schema: Any) -> Mapping[str, Any]:
    if schema is None:
        missing("text.format.schema")
    if not isinstance(schema, Mapping):
        refuse("text.format.schema", "must be a JSON Schema: an object")
    return cast(Mapping[str, Any], schema)
