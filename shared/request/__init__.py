"""Rules for one user request: its parameters, its seed, its conversation. Pure: no bus, no HTTP, no clock.

The gateway and the offline `LLM` use this package, so both accept the same requests and give the same answers.

| module            | what it does                                                      |
|-------------------|-------------------------------------------------------------------|
| `checks`          | checks of single fields, and the errors that name one             |
| `choices`         | the sequences of a prompt: how many, with which parameters        |
| `sampling_fields` | constraints that name tokens, and seeds                           |
| `structured`      | converts the fields for structured output to a grammar            |
| `conversation`    | converts a client's chat messages to the chat template's messages |
| `tools`           | checks tools and other variables of the chat template             |
| `outputs`         | the results of a request: `RequestOutput` and its parts           |
"""
