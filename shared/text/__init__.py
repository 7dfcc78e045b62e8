"""Text and tokens: encoding, chat templates, incremental detokenization, stop strings. Pure: no bus, no clock.

The tokenizer service, the detokenizer service and the offline `LLM` use this package, so that all three give the same
text for the same tokens.

| module              | what it does                                                     |
|---------------------|------------------------------------------------------------------|
| `codec`             | converts text to token ids and back; named special tokens        |
| `templates`         | converts a conversation to the text of a prompt                  |
| `detokenization`    | converts tokens to text incrementally; stop strings              |
| `grammars`          | the grammars of structured output                                |
| `infill`            | prompts for filling in text between a prefix and a suffix        |
| `special_tokens`    | breaks special tokens in texts of users                          |
| `bad_words`         | words that an output must not contain, as token ids              |
| `tokenizer_adapter` | tokenizers without a `tokenizer.json`                            |
| `vocabulary`        | converts token ids to bytes                                      |
| `pieces`            | the bytes that each token adds to a text                         |
| `reasoning`         | separates a reasoning model's thoughts from its answer           |
| `channels`          | the same for the messages of gpt-oss                             |

This file imports nothing, so that a process loads only the modules that it uses.
"""
