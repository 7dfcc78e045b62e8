"""The OpenAI API: bodies in, answers out. It knows the backend by `generation` alone, and nothing of the bus.

| step | module                                | what happens                                                   |
|------|---------------------------------------|----------------------------------------------------------------|
| 1    | `endpoints`                           | a route reads the body and asks for a generation               |
| 2    | `unsupported_params`, `body`, `schemas` | unknown fields are refused; bytes become a struct            |
| 3    | `parameters`                          | the struct becomes a `GenerationRequest`                       |
| 4    | `response_runner`                     | runs the generation, whole or as a stream                      |
| 5    | `choices`                             | collects what each choice has come to                          |
| 6    | `full_response`, `stream_encoder`     | the JSON of a whole answer, or of each chunk                   |
"""
