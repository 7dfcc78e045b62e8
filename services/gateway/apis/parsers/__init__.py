"""Separates a model's output into the answer's text, its reasoning, and its calls of tools. Pure; no HTTP, no bus.

Whole and streamed answers use the same code: `OutputParser.feed` takes text in pieces of any size and returns events,
`finish` returns the last ones. How the text is cut into pieces does not change the result.

| module             | what it does                                                            |
|--------------------|-------------------------------------------------------------------------|
| `output_parser`    | the parser of one output: reasoning first, then tools                   |
| `formats`          | the formats by the names in settings and tokenizers' announcements      |
| `events`           | what a parser returns                                                   |
| `call_grammars`    | the grammar of each format, which keeps calls to the schemas of tools   |
| `reader`           | reads text that arrives in pieces                                       |
| `tool_parser`      | base class of the formats of tool calls: content, held text, JSON calls |
| `json_formats`     | calls as JSON objects: hermes, llama3_json, mistral, deepseek_v3        |
| `tagged_arguments` | calls with a tag for each argument: glm45, qwen3_coder                  |
| `pythonic`         | calls in Python's syntax                                                |
| `named_call`       | output that is nothing but the arguments of one call                    |

The reasoning is separated by `antiphon.shared.text.reasoning`, which the offline `LLM` uses as well.

A parser never loses text: text that looks like a call but is not one is returned as content. Only the whitespace around
a call is dropped.
"""
