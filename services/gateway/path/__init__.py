"""Runs a `GenerationRequest` on the bus: places its sequences on engines and collects their text. No HTTP.

A placement is the assignment of one sequence to an engine and a detokenizer. Each placement has a new attempt number.

| step | module                           | what it does                                                  |
|------|----------------------------------|---------------------------------------------------------------|
| 1    | `backend`                        | accepts the request                                           |
| 2    | `requests.preparation`           | has the prompts tokenized and queues the sequences            |
| 3    | `placement/`                     | queues sequences for an engine with credit, which `router` chooses |
| 4    | `messages`                       | builds the messages to the engine and the detokenizer         |
| 5    | `actor`                          | receives all messages for the gateway                         |
| 6    | `requests.request_actor`         | runs one request from its first event to its end              |
| 7    | `sequence_state`                 | applies text events; ignores those of older attempts          |
| 8    | `requests.placements`, `losses`  | place sequences again whose members are lost                  |
|      | `requests.repairs`, `liveness/`  | open streams again; list the sequences without text           |
| 9    | `outlet`                         | passes new output on to the HTTP edge                         |
| 10   | `requests.placements`            | has the engine and the detokenizer release a sequence         |
"""
