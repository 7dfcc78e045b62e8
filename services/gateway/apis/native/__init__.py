"""`POST /generate`, the API of servers without OpenAI's endpoints, in two forms.

In the text form, a body has only a prompt and sampling parameters and is answered with text. In the engine form, a body
has a field that the text form lacks (`request_id`, `sampling_params`, `messages`, …) and is answered with a
`RequestOutput`. With `USE_OPENAI=0` the server has no other API.

| step | module     | what it does                                                                          |
|------|------------|---------------------------------------------------------------------------------------|
| 1    | `endpoint` | reads the body, determines its form, runs the generation                              |
| 2    | `schemas`  | the bodies as structs                                                                 |
| 3    | `convert`  | converts the body to a body of OpenAI's API, and that to `GenerationRequest`          |
| 4    | `encoders` | encodes the answers of both forms, whole or as a stream                               |
"""
