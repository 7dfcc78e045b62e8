"""The OpenAI API: request bodies and answers. Uses the backend only through `generation`; does not use the bus.

| step | module                                  | what it does                                             |
|------|-----------------------------------------|----------------------------------------------------------|
| 1    | `endpoints`                             | reads the body of a request and starts the generation    |
| 2    | `unsupported_params`, `body`, `schemas` | refuses unknown fields; decodes the bytes to a struct    |
| 3    | `parameters`, `chat_request`            | checks the struct and converts it to `GenerationRequest` |
| 4    | `serving`, `response_runner`            | runs the generation; answers whole or as a stream        |
| 5    | `choices`                               | collects the output of each choice                       |
| 6    | `full_response`, `stream_encoder`       | encodes a whole answer, or each chunk, as JSON           |

The other APIs (`native`, `anthropic`, `responses`, `ollama`) convert their bodies to the bodies of this package, so
steps 3 to 5 are the same for all; each has an encoder of its own (`answer_encoder`) for step 6.
"""
