"""Adds the request bodies to `/openapi.json`: endpoints decode bodies themselves, so FastAPI does not know them."""

from typing import Any

import msgspec
from fastapi import FastAPI

from services.gateway.openai.pooling.schemas import EmbeddingBody, RerankBody, ScoreBody
from services.gateway.openai.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

_BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/embeddings": EmbeddingBody,
    "/v1/score": ScoreBody,
    "/score": ScoreBody,
    "/v1/rerank": RerankBody,
    "/rerank": RerankBody,
    "/v2/rerank": RerankBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
_REQUIRED: dict[type[msgspec.Struct], list[str]] = {
    CompletionBody: ["prompt"],
    ChatBody: ["messages"],
    EmbeddingBody: ["input"],
    ScoreBody: ["text_1", "text_2"],
    RerankBody: ["query", "documents"],
}
_ERROR: dict[str, Any] = {
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
}


def request_body(path: str) -> dict[str, Any]:
    """Returns the request body's part of the description of a POST route."""
    return {"requestBody": {"required": True, "content": _json_of(_BODIES[path].__name__)}}


def error_responses() -> dict[int | str, dict[str, Any]]:
    """Returns the description of the error responses, which every route may give."""
    return {"default": {"description": "Error", "content": _json_of("Error")}}


def add_schemas(app: FastAPI) -> None:
    """Adds the schemas of the bodies to the OpenAPI document that the application generates."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        document.setdefault("components", {}).setdefault("schemas", {}).update(_schemas())
        return document

    app.openapi = openapi


def _schemas() -> dict[str, Any]:
    _, components = msgspec.json.schema_components(_BODIES.values(), ref_template="#/components/schemas/{name}")
    schemas: dict[str, Any] = {**components, "Error": _ERROR}
    for body, names in _REQUIRED.items():
        schemas[body.__name__]["required"] = names
    return schemas


def _json_of(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
