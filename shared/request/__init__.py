"""One user request and its sequences: rules for parameters, seeds, conversations. Pure: no bus, no HTTP, no clock.

The gateway and the offline `LLM` use it, so that both accept the same requests and give the same answer.

| module         | what it does                                                         |
|----------------|----------------------------------------------------------------------|
| `checks`       | raises the errors that name a wrong parameter                        |
| `rules`        | choices, stop strings, and what every choice samples with            |
| `seed_source`  | the seed of a request that has none                                  |
| `conversation` | chat messages as clients send them, to messages that a template takes |
"""
