"""Ollama's API: chat, generate, embeddings, and the models that are served.

| module         | what it does                                                                     |
|----------------|----------------------------------------------------------------------------------|
| `endpoints`    | reads the body of a request, and starts the generation or describes a model      |
| `embed`        | the endpoints for embeddings                                                     |
| `library`      | lists the models, and answers requests that would change the list                |
| `lookup`       | reads bodies and finds the models that they name                                 |
| `schemas`      | the bodies, and the fields that are refused or have no effect                    |
| `options`      | reads the sampling options, which have llama.cpp's names                         |
| `convert`      | converts a body to the body of a chat or completion request of `openai`          |
| `conversation` | converts messages, with calls of tools and their results, to turns               |
| `encoder`      | encodes an answer, whole or as lines of JSON                                     |
| `models`       | describes the models that can be used                                            |
| `errors`       | encodes error objects                                                            |
"""
