"""Incremental detokenization: converts tokens to text, token by token. Pure.

| module         | what it does                                                    |
|----------------|-----------------------------------------------------------------|
| `stream`       | one sequence: token events in, text events out                  |
| `sequencer`    | puts the token events of a sequence in order                    |
| `incremental`  | text of tokens, without broken characters or later corrections  |
| `stop_strings` | finds the stop string that ends a text                          |
"""
