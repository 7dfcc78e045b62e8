"""The offline API: a model in the process of the program that uses it. `antiphon` exports its public names.

| module            | what it is                                                       |
|-------------------|------------------------------------------------------------------|
| `llm`             | `LLM`: many prompts at once, from one thread                     |
| `async_engine`    | `AsyncLLMEngine`: requests that come and go, in asyncio          |
| `runner`          | what both drive: an engine and the requests on it                |
| `request`         | one prompt under way                                             |
| `prompt_text`     | tokenizer, chat template and vocabulary                          |
| `inputs`          | prompts and parameters of a call in one form                     |
| `engine_args`     | settings as keyword arguments                                    |
| `sampling_params` | `SamplingParams`                                                 |
| `outputs`         | `RequestOutput`, `CompletionOutput`, `RequestMetrics`, `Logprob` |

Nothing is imported here, so that `import antiphon` is light.
"""
