"""Ollama's API: `/api/chat`, `/api/generate`, `/api/tags`, `/api/show` and `/api/version`.

| module         | what it does                                                                     |
|----------------|----------------------------------------------------------------------------------|
| `endpoints`    | reads the body of a request, and starts the generation or describes models       |
| `schemas`      | the bodies, and the fields that are refused or have no effect                    |
| `options`      | reads the sampling options, which have llama.cpp's names                         |
| `convert`      | converts a body to the body of a chat or completion request of `openai`          |
| `conversation` | converts messages, with calls of tools and their results, to turns               |
| `encoder`      | encodes an answer, whole or as lines of JSON                                     |
| `models`       | describes the models that can be used                                            |
| `errors`       | encodes error objects                                                            |
"""

from services.gateway.ollama.errors import SCHEMA, error_body
from services.gateway.ollama.schemas import OllamaChatBody, OllamaGenerateBody, OllamaShowBody
from services.gateway.openai.openapi import Body

BODIES = {
    "/api/chat": Body(OllamaChatBody, ("model", "messages")),
    "/api/generate": Body(OllamaGenerateBody, ("model",)),
    "/api/show": Body(OllamaShowBody, ("model",)),
}
STREAMING = ("/api/chat", "/api/generate")
"""Routes whose answers are streams unless the body's `stream` is false."""
ERROR_FORMATS = {"/api/": error_body}
ERROR_SCHEMAS = {"/api/": SCHEMA}
