"""Requests on the bus: from a `GenerationRequest` to placed sequences and their text. It knows nothing of HTTP.

| step | module                       | what happens                                                          |
|------|------------------------------|-----------------------------------------------------------------------|
| 1    | `request_actor`              | conducts one request                                                  |
| 2    | `prompts`, `service_clients` | the prompts are tokenized                                             |
| 3    | `dispatcher`                 | sequences wait (`placement_queue`) for an engine with credit (`router`) |
| 4    | `messages`                   | what engine and detokenizer are told                                  |
| 5    | `sequence_state`             | what a text event changes; the attempt fences older placements        |
| 6    | `progress_watch`             | which sequences the engine is asked about                             |
"""
