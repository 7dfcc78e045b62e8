"""Text and tokens: encoding, chat templates, incremental detokenization, stop strings. Pure: no bus, no clock.

The tokenizer service, the detokenizer service and the offline `LLM` use this package, so that all three give the same
text for the same tokens.

| module              | what it does                                                     |
|---------------------|------------------------------------------------------------------|
| `codec`             | text to token ids and back; special tokens and the chat template |
| `chat_template`     | renders a conversation in a sandbox                              |
| `bad_words`         | words that an output must not contain, as token ids              |
| `constraint`        | compiles the grammars of structured output                       |
| `turns`             | chat turns as texts, for the chat template                       |
| `tokenizer_adapter` | tokenizers without a `tokenizer.json`                            |
| `vocabulary`        | token ids to bytes                                               |
| `pieces`            | the bytes that each token adds to a text                         |
| `incremental`       | incremental detokenization                                       |
| `stop_strings`      | finds the stop string that ends a text                           |
| `sequencer`         | puts the token events of a sequence in order                     |
| `stream`            | one sequence: token events in, text events out                   |
| `marks`             | finds the beginning of a tag at the end of growing text          |
| `reasoning`         | separates a reasoning model's thoughts from its answer           |
| `template_formats`  | recognises the formats of tool calls and reasoning               |

This file imports nothing, so that a process loads only the modules that it uses.
"""
