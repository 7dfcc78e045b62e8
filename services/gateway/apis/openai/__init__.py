"""The OpenAI API: request bodies and answers. Uses the backend only through `generation`; does not use the bus.

| step | module                                  | what it does                                                       |
|------|-----------------------------------------|--------------------------------------------------------------------|
| 1    | `chat`, `completions`                   | the endpoint; checks and converts its body to `GenerationRequest`  |
|      | `request_fields`, `schemas`         | refuses unknown fields; decodes the bytes to a struct              |
|      | `parameters`                            | the part of the conversion that both endpoints have in common      |
| 2    | `serving`                               | runs the generation; answers whole or as a stream                  |
| 3    | `choices`                               | collects the output of each choice                                 |
| 4    | `full_response`, `stream_encoder`       | encodes a whole answer, or each chunk, as JSON                     |

The other APIs (`native`, `anthropic`, `responses`, `ollama`) convert their bodies to the bodies of this package, so
conversion, serving and choices are the same for all; each has an encoder of its own (`answer_encoder`).
"""
