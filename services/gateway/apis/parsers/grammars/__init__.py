"""The grammars of tool calls in each format of `formats`, for constrained output. Pure.

With strict tools, a grammar is free text in which a call names one of the request's tools, and the arguments of a
strict tool follow its JSON Schema. In text that follows the grammar, everything that the format's parser recognises as
a call is such a call. If calls are forced, the grammar (`only_…`) consists of calls alone. Formats that do not write
arguments as one JSON object have no grammar of calls alone, because not every schema can be enforced in them.

| module         | what it has                                                          |
|----------------|----------------------------------------------------------------------|
| `pieces`       | what all formats use: the tools of a request, pieces of grammars     |
| `json_calls`   | formats with a JSON object of arguments                              |
| `tagged_calls` | formats with tags around each argument                               |
| `python_calls` | formats in Python's syntax                                           |
| `gemma_calls`  | the format of Gemma 4                                                |
"""
