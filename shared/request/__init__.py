"""Rules for one user request: its parameters, its seed, its conversation. Pure: no bus, no HTTP, no clock.

The gateway and the offline `LLM` use this package, so both accept the same requests and give the same answers.

| module              | what it does                                                      |
|---------------------|-------------------------------------------------------------------|
| `checks`            | raises the errors that name a wrong parameter                     |
| `choices`           | how many sequences a prompt needs, and which of them are returned |
| `rules`             | checks of single fields; sampling parameters of each choice       |
| `sampling_fields`   | builds the engine's sampling parameters from a request's fields   |
| `structured`        | converts the fields for structured output to a grammar            |
| `token_constraints` | converts the fields that name tokens                              |
| `seed_source`       | draws the seed of a request that has none                         |
| `conversation`      | converts a client's chat messages to the chat template's messages |
| `tools`             | checks tools and other variables of the chat template             |
| `outputs`           | the results of a request: `RequestOutput` and its parts           |
"""
