"""Adds the request bodies to `/openapi.json`.

FastAPI does not know them, because endpoints decode bodies themselves.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from fastapi import FastAPI

StructType = type[msgspec.Struct]


class Body(NamedTuple):
    """The body of a route. `required`: fields that must be given although the struct has a default for them."""

    type: StructType
    required: tuple[str, ...] = ()
    other: StructType | None = None
    """A second form of the body."""


class ErrorSchema(NamedTuple):
    """The JSON schema of an API's error objects. `name`: its name in the document."""

    name: str
    schema: dict[str, Any]


ERROR = ErrorSchema(
    "Error",
    {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": "string"},
                },
            }
        },
    },
)


def request_body(body: Body) -> dict[str, Any]:
    """Returns the request body's part of the description of a POST route."""
    content = _json_of(body.type.__name__) if body.other is None else _either(body.type.__name__, body.other.__name__)
    return {"requestBody": {"required": True, "content": content}}


def error_responses(error: ErrorSchema = ERROR) -> dict[int | str, dict[str, Any]]:
    """Returns the description of the error responses that every route may send."""
    return {"default": {"description": "Error", "content": _json_of(error.name)}}


def add_schemas(app: FastAPI, bodies: Sequence[Body], errors: Sequence[ErrorSchema] = ()) -> None:
    """Adds the schemas of the bodies to the OpenAPI document that the application generates.

    `errors`: schemas of error objects in addition to OpenAI's.
    """
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas |= _schemas(bodies)
        schemas |= {error.name: error.schema for error in (ERROR, *errors)}
        return document

    app.openapi = openapi


def _schemas(bodies: Sequence[Body]) -> dict[str, Any]:
    types = [kind for body in bodies for kind in (body.type, body.other) if kind is not None]
    _, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schemas: dict[str, Any] = {**components}
    for body in bodies:
        if body.required:
            schemas[body.type.__name__]["required"] = list(body.required)
    return schemas


def _either(*names: str) -> dict[str, Any]:
    forms = [_json_of(name)["application/json"]["schema"] for name in names]
    return {"application/json": {"schema": {"anyOf": forms}}}


def _json_of(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
