"""Separates a model's output into the answer's text, its reasoning, and its calls of tools. Pure; no HTTP, no bus.

Whole and streamed answers use the same code: `OutputParser.feed` takes text in pieces of any size and returns events,
`finish` returns the last ones. How the text is cut into pieces does not change the result.

| module              | what it does                                                                 |
|---------------------|------------------------------------------------------------------------------|
| `output_parser`     | the parser of one output: reasoning first, then tools                        |
| `formats`           | the formats of calls by the names in settings and tokenizers' announcements  |
| `reasoning_formats` | the formats of reasoning by these names                                      |
| `events`            | what a parser returns                                                        |
| `grammars`          | the grammar of each format, which keeps calls to the schemas of tools        |
| `reader`            | reads text that arrives in pieces                                            |
| `tool_parser`       | base class of the formats of tool calls: content, held text, JSON calls      |
| `json_formats`      | calls with a JSON object: hermes, llama3_json, mistral, deepseek_v3, kimi_k2 |
| `harmony`           | calls as messages with a recipient: gpt_oss                                  |
| `tagged_arguments`  | calls with a tag for each argument: glm45, qwen3_coder, minimax_m2, …        |
| `gemma`             | calls with objects that are not JSON: gemma4                                 |
| `pythonic`          | calls in Python's syntax: pythonic, lfm2                                     |
| `named_call`        | output that is nothing but the arguments of one call                         |

A new format is a parser and a grammar, an entry of `formats`, and the texts that show it in a template, in
`antiphon.shared.settings.output_formats`.

The reasoning is separated by `antiphon.shared.text.reasoning`, which the offline `LLM` uses as well, and by
`antiphon.shared.text.channels`.

A parser never loses text: text that looks like a call but is not one is returned as content. Only the whitespace around
a call is dropped.
"""
