"""Anthropic's API: `POST /v1/messages` and `POST /v1/messages/count_tokens`.

| module         | what it does                                                       |
|----------------|--------------------------------------------------------------------|
| `endpoints`    | reads the body of a request and starts the generation              |
| `schemas`      | the bodies, and the fields that are refused or have no effect      |
| `convert`      | converts a body to the body of a chat request of `openai`          |
| `conversation` | converts messages with their content blocks to turns               |
| `pictures`     | reads pictures                                                     |
| `tools`        | converts tools and the choice among them                           |
| `encoder`      | encodes a message, whole or as named events, with its content      |
| `errors`       | encodes error objects                                              |
"""

from services.gateway.anthropic.errors import SCHEMA, error_body
from services.gateway.anthropic.schemas import CountTokensBody, MessagesBody
from services.gateway.openai.openapi import Body

BODIES = {
    "/v1/messages": Body(MessagesBody, ("messages", "max_tokens")),
    "/v1/messages/count_tokens": Body(CountTokensBody, ("messages",)),
}
ERROR_FORMATS = {"/v1/messages": error_body}
ERROR_SCHEMAS = {"/v1/messages": SCHEMA}
