"""The APIs for pooling: embeddings, score, rerank, classify.

| module      | contents                                                                              |
|-------------|---------------------------------------------------------------------------------------|
| `endpoints` | the routes: decode a body, run the request, encode the answer                         |
| `schemas`   | the bodies of the requests                                                            |
| `requests`  | converts a body to a `GenerationRequest` with pooling: defaults, ranges, limits       |
| `runner`    | runs a request and collects its vectors                                               |
| `answers`   | scores from vectors, and the bodies of the answers                                    |
"""
