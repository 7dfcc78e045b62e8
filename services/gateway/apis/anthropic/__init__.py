"""Anthropic's API: `POST /v1/messages` and `POST /v1/messages/count_tokens`.

| module         | what it does                                                  |
|----------------|---------------------------------------------------------------|
| `endpoints`    | reads the body of a request and starts the generation         |
| `schemas`      | the bodies, and the fields that are refused or have no effect |
| `convert`      | converts a body to the body of a chat request of `openai`     |
| `conversation` | converts messages with their content blocks to turns          |
| `images`       | reads images                                                  |
| `tools`        | converts tools and the choice among them                      |
| `encoder`      | encodes a message, whole or as named events, with its content |
| `errors`       | encodes error objects                                         |
"""
