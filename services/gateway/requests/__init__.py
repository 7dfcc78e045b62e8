"""Runs a `GenerationRequest` on the bus: places its sequences on engines and collects their text. No HTTP.

A placement is the assignment of one sequence to an engine and a detokenizer. Each placement has a new attempt number.

| step | module                           | what it does                                                              |
|------|----------------------------------|---------------------------------------------------------------------------|
| 1    | `preparation`, `service_clients` | has the prompts tokenized and queues the sequences                        |
| 2    | `placement/`                     | queues sequences for an engine with credit, which `router` chooses        |
| 3    | `messages`                       | builds the messages to the engine and the detokenizer                     |
| 4    | `request_actor`                  | runs one request from its first event to its end                          |
| 5    | `sequence_state`                 | applies text events; ignores those of older attempts                      |
| 6    | `liveness/`                      | lists the sequences without text, about which the engine is asked         |
| 7    | `places`                         | has the engine and the detokenizer release a sequence                     |
"""
