"""The offline API: runs a model in the process of the program that uses it. `antiphon` exports the public names.

| module            | contents                                                         |
|-------------------|------------------------------------------------------------------|
| `llm`             | `LLM`: generates for a list of prompts, from one thread          |
| `async_engine`    | `AsyncLLMEngine`: concurrent requests in asyncio                 |
| `runner`          | used by both: an engine and its running requests                 |
| `request`         | one running request: a prompt and its `n` sequences              |
| `pooling`         | parameters and results of `embed`, `classify` and `score`        |
| `prompts/`        | prompts and parameters in one form, chat template, images        |
| `adapters`        | `LoRARequest`, `PromptAdapterRequest`: adapters of a call        |
| `engine_args`     | settings as keyword arguments                                    |
| `sampling_params` | `SamplingParams`                                                 |

The results (`RequestOutput` and its parts) are in `antiphon.shared.request.outputs`: the server's `/generate` has the
same form. This module imports nothing, so that `import antiphon` is fast.
"""
