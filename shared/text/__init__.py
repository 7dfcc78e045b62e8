"""Text and tokens: encoding, chat templates, incremental detokenization, stop strings. Pure: no bus, no clock.

The tokenizer service, the detokenizer service and the offline `LLM` use it, so that all three give the same text for
the same tokens.

| module              | what it does                                                     |
|---------------------|------------------------------------------------------------------|
| `codec`             | text to token ids and back; special tokens and the chat template |
| `chat_template`     | renders a conversation in a sandbox                              |
| `tokenizer_adapter` | tokenizers that are no `tokenizer.json`                          |
| `vocabulary`        | token ids to bytes                                               |
| `incremental`       | tokens to text as they come                                      |
| `stop_strings`      | finds the stop string that ends a text                           |
| `stream`            | one sequence: token events in, text events out                   |

Nothing is imported here: a process loads only the modules that it uses.
"""
