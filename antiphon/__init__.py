"""Antiphon: a serving system for language models. The package has the offline API and the command `antiphon`.

    from antiphon import LLM, SamplingParams

    llm = LLM("DIRECTORY OR HUB NAME")
    for output in llm.generate(["What is 12 + 7?"], SamplingParams(temperature=0, max_tokens=32)):
        print(output.outputs[0].text)

Each public name is imported when a program first uses it, so `import antiphon` alone is fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

from antiphon.shared.version import __version__

if TYPE_CHECKING:
    from antiphon.offline.adapters import LoRARequest, PromptAdapterRequest
    from antiphon.offline.async_engine import AsyncLLMEngine
    from antiphon.offline.engine_args import EngineArgs
    from antiphon.offline.llm import LLM
    from antiphon.offline.pooling import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingParams,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )
    from antiphon.offline.prompts.guided import GuidedDecodingRequest, LLMGuidedOptions
    from antiphon.offline.prompts.inputs import PromptInput, PromptInputs
    from antiphon.offline.sampling_params import SamplingParams
    from antiphon.shared.request.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput

__all__ = [
    "LLM",
    "AsyncLLMEngine",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "GuidedDecodingRequest",
    "LLMGuidedOptions",
    "LoRARequest",
    "Logprob",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptAdapterRequest",
    "PromptInput",
    "PromptInputs",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "__version__",
]

_HOMES = {
    "LLM": "antiphon.offline.llm",
    "AsyncLLMEngine": "antiphon.offline.async_engine",
    "CompletionOutput": "antiphon.shared.request.outputs",
    "ClassificationRequestOutput": "antiphon.offline.pooling",
    "EmbeddingRequestOutput": "antiphon.offline.pooling",
    "EngineArgs": "antiphon.offline.engine_args",
    "GuidedDecodingRequest": "antiphon.offline.prompts.guided",
    "LLMGuidedOptions": "antiphon.offline.prompts.guided",
    "LoRARequest": "antiphon.offline.adapters",
    "Logprob": "antiphon.shared.request.outputs",
    "PoolingParams": "antiphon.offline.pooling",
    "PoolingRequestOutput": "antiphon.offline.pooling",
    "PromptAdapterRequest": "antiphon.offline.adapters",
    "PromptInput": "antiphon.offline.prompts.inputs",
    "PromptInputs": "antiphon.offline.prompts.inputs",
    "RequestMetrics": "antiphon.shared.request.outputs",
    "RequestOutput": "antiphon.shared.request.outputs",
    "SamplingParams": "antiphon.offline.sampling_params",
    "ScoringRequestOutput": "antiphon.offline.pooling",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'antiphon' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
